from collections.abc import Callable
from typing import Any

from msgpack.exceptions import (
    ExtraData as ExtraData,
    OutOfData as OutOfData,
    UnpackException as UnpackException,
)

class ExtType:
    code: int
    data: bytes
    def __init__(self, code: int, data: bytes) -> None: ...

class Packer:
    def __init__(
        self,
        *,
        default: Callable[[Any], Any] | None = None,
        use_single_float: bool = False,
        use_bin_type: bool = True,
        strict_types: bool = False,
        unicode_errors: str | None = None,
    ) -> None: ...
    def pack(self, obj: object) -> bytes: ...

class Unpacker:
    def __init__(self, *, max_buffer_size: int = ...) -> None: ...
    def feed(self, next_bytes: bytes | bytearray | memoryview) -> None: ...
    def skip(self) -> None: ...

def packb(
    o: object,
    *,
    default: Callable[[Any], Any] | None = None,
    use_single_float: bool = False,
    use_bin_type: bool = True,
    strict_types: bool = False,
    unicode_errors: str | None = None,
) -> bytes: ...
def unpackb(
    packed: bytes | bytearray | memoryview,
    *,
    use_list: bool = True,
    raw: bool = False,
    strict_map_key: bool = True,
    object_hook: Callable[[dict[Any, Any]], Any] | None = None,
    ext_hook: Callable[[int, bytes], Any] = ...,
    unicode_errors: str | None = None,
    max_array_len: int = -1,
    max_map_len: int = -1,
) -> Any: ...
