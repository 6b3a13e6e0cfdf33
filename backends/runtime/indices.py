"""Range checks of index tensors. Pasted as text into emitted programs; numpy arrays do as well."""

from typing import Any


class IndexOutOfRange(IndexError):
    """An index tensor holds a value that is no index of the dim it is used on.

    `position` maps the dims of the index tensor to global positions; `str()` is `message`.
    """

    def __init__(
        self, place: str, position: dict[str, int], value: int, size: int, message: str
    ) -> None:
        super().__init__(message)
        self.place, self.position, self.value, self.size = place, position, value, size
        self.message = message


def check_index(
    index: Any,
    dim: str,
    size: int,
    place: str,
    dims: tuple[str, ...],
    offsets: tuple[int, ...],
) -> Any:
    """Return `index` if all of it lies in 0 … size - 1, else raise `IndexOutOfRange`.

    `index` is an integer torch tensor or numpy array with dims `dims`; its first element has the
    global position `offsets`. The error names the first bad element in row-major order.
    """
    bad = (index < 0) | (index >= size)
    if not bad.any():
        return index
    flat = bad.reshape(-1).tolist().index(True)
    value = int(index.reshape(-1)[flat])
    position = {}
    for name, extent, offset in reversed(list(zip(dims, index.shape, offsets, strict=True))):
        flat, local = divmod(flat, extent)
        position[name] = offset + local
    position = dict(reversed(position.items()))
    where = ", ".join(f"{name}={at}" for name, at in position.items())
    message = (
        f"MD0801 {place}: index {value} {f'at [{where}] ' if where else ''}"
        f"is out of range for dim `{dim}` of size {size}"
    )
    raise IndexOutOfRange(place, position, value, size, message)
