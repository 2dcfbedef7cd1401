"""The kernels of the output head, compiled for an H100 by a machine without a GPU.

Writes a JSON object: kernel, type and what the head has -> what the machine code does.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trinity_buffer.trainer import head_kernels

TYPES = {"stride": "i32", "columns": "i32", "scale": "fp32", "softcap": "fp32", "places": "*i64"}
"""Of arguments; all others point at float32, but products and a bias."""
OPTIONAL = {"bias", "softcap", "temperature", "of_entropy"}


def source(kernel: Any, number: str, *, plain: bool) -> ASTSource:
    """Return a kernel for products of a type, and a head that has all or nothing."""
    types = {**TYPES, "products": f"*{number}", "bias": f"*{number}"}
    constants: dict[str, Any] = {"block": head_kernels.BLOCK}
    if plain:
        constants |= dict.fromkeys(OPTIONAL.intersection(kernel.arg_names))
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*fp32")
        for name in kernel.arg_names
    }
    aligned = {  # as Triton notes of pointers, and of numbers that 16 divides
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith(("*", "i32"))
    }
    return ASTSource(kernel, signature, constants, aligned)


def main() -> None:
    """Compile all."""
    made = {}
    for name in ("add_kernel", "gradient_kernel", "entropy_kernel"):
        for number in ("bf16", "fp16", "fp32"):
            for plain in (True, False):
                what = source(getattr(head_kernels, name), number, plain=plain)
                code = triton.compile(what, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
                made[f"{name} {number} {'plain' if plain else 'all'}"] = {
                    "loads of 16 bytes": len(re.findall(r"ld\.global\S*\.v4\.b32", code)),
                    "stores of 16 bytes": len(re.findall(r"st\.global\S*\.v4\.b32", code)),
                    "uses of local memory": len(re.findall(r"\.local", code)),
                }
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
