"""numpy, imported when something of it is first used: who only looks at programs needs none of it.

`from meshdsl.backends.runtime.lazy_numpy import np` is `import numpy as np` to a reader, a type
checker and an emitted program. What a module does with `np` while it is itself imported would
import numpy at once: `lambda x: np.exp(x)` waits, `np.exp` does not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
else:

    class _Numpy:
        """A stand-in for the module; each name is looked up there once."""

        def __getattr__(self, name: str) -> Any:
            import numpy

            value = getattr(numpy, name)
            setattr(self, name, value)
            return value

    np = _Numpy()

__all__ = ["np"]
