"""meshdsl: tensor programs with named dimensions, compiled to one torch program per device.

The grammar and the backends lie beside this folder in a checkout and inside it in an installed
copy; they are `meshdsl.grammar` and `meshdsl.backends` in both.
"""

from pathlib import Path

__version__ = "0.1.0"

_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "grammar" / "mdsl.lark").is_file():
    __path__.append(str(_CHECKOUT))
