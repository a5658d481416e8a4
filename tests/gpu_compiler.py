"""Compile Triton kernels for GPUs that are not here, and read what they take."""

import re
import subprocess
from pathlib import Path


def compile_for(kernel, capability, types, constants, aligned, **options):
    """Compile a kernel: types and constants by the names of its arguments, aligned those that 16 divides."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, known, divisible = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], known[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = types[name]
        if name in aligned:
            divisible[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, known, divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(kernel, folder):
    """Return the registers of a thread, and the bytes that spilled from them."""
    import triton

    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(program), "--dump-resource-usage", str(folder / "kernel.cubin")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", shown).group(1)) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local
