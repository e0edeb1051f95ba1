"""Runs Metal kernels on x86-64 Linux, lane by lane: MLX's bitcode, or text in the Metal language.

Both become LLVM assembly for the processor, without fast-math flags. A product and a sum become one
operation only where the kernel says so: `fma`, and `llvm.fmuladd`, where MLX leaves it to Apple's
compiler. Each array ends at a page that cannot be accessed, so whatever reads or writes past its
end stops the process.
"""

import ctypes
import mmap
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np

Array = np.ndarray[Any, Any]

HERE = Path(__file__).parent
N_LANES = 32
N_SIMDGROUPS = 2
MAX_CALLS = 64
COMPILE = [
    *(sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu", "-march=x86_64_v3"),
    *("-std=c++14", "-O1", "-ffp-contract=off", "-fno-vectorize", "-fno-slp-vectorize"),
    *("-fno-exceptions", "-fno-sanitize=all", "-Wall", "-Werror", "-Wno-unknown-attributes"),
    *("-Wno-unused-command-line-argument", "-g0", "-S", "-emit-llvm", "-I", str(HERE)),
]

BITCODE_ENTRY = """
define void @"lane {name}"(ptr %buffers, ptr %place) {{
  %threadgroup = load <3 x i32>, ptr %place, align 4
  %simdgroup.at = getelementptr i32, ptr %place, i64 3
  %simdgroup = load i32, ptr %simdgroup.at
  %lane.at = getelementptr i32, ptr %place, i64 4
  %lane = load i32, ptr %lane.at
  {loads}
  call void @{name}({buffers}, <3 x i32> %threadgroup, i32 %simdgroup, i32 %lane)
  ret void
}}
"""
TEXT_ENTRY = """
namespace kernel{i} {{
{text}
}}
extern "C" void lane{i}(void** buffers, const Place& place) __asm__("lane {name}");
void lane{i}(void** buffers, const Place& place) {{
  kernel{i}::{call};
}}
"""


PARAMETER = r"^  (.*?) ?\w+ \[\[(\w+)(?:\((\d+)\))?\]\]"
"""Of a generated kernel: its type, its attribute, and the number of a buffer."""


FAST_MATH = r" = f\w+ (fast|nnan|ninf|nsz|arcp|contract|afn|reassoc) "
"""An operation in LLVM assembly with a fast-math flag."""


class Run(NamedTuple):
    """What a kernel did.

    Attributes:
        output: the array that it wrote.
        operands: of all calls of `simd_sum` (calls, lanes), simdgroup after simdgroup.
        calls: how many of them each simdgroup made.
    """

    output: Array
    operands: Array
    calls: Array


class Lanes:
    """Holds kernels by name, and runs them."""

    def __init__(self):
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), make_machine())
        assembly = _compile((HERE / "lanes.cpp").read_text())
        self._load(assembly)
        self._defined = set(re.findall(r"^define .*@(air\.[\w.]+)\(", assembly, re.MULTILINE))
        pointer = ctypes.c_void_p
        kind = ctypes.CFUNCTYPE(None, pointer, pointer, ctypes.c_uint32, pointer, pointer)
        self._run = kind(self._engine.get_function_address("run"))
        grid = ctypes.CFUNCTYPE(None, pointer, pointer, ctypes.c_uint32, ctypes.c_uint32, pointer)
        self._run_grid = grid(self._engine.get_function_address("run_grid"))

    def load_bitcode(self, name: str, bitcode: bytes):
        """Loads a kernel of a metallib that takes buffers, then the place of the lane.

        Raises:
            ValueError: it cannot be run here.
        """
        text = str(llvm.parse_bitcode(bitcode))
        called = set(re.findall(r"^declare .*@(air\.[\w.]+)\(", text, re.MULTILINE))
        if called - self._defined:
            raise ValueError(f"lanes.cpp does not define {sorted(called - self._defined)}")
        if re.search(FAST_MATH, text):
            raise ValueError("an operation may be computed in another way than it is written")
        text = text.replace("@llvm.fmuladd.", "@llvm.fma.")
        (signature,) = re.findall(rf"^define .*@{name}\((.*)\).*\{{$", text, re.MULTILINE)
        loads = []
        buffers = []
        for i, space in enumerate(re.findall(r"ptr addrspace\((\d)\)", signature)):
            loads.append(f"%slot{i} = getelementptr ptr, ptr %buffers, i64 {i}")
            loads.append(f"%at{i} = load ptr, ptr %slot{i}")
            loads.append(f"%buffer{i} = addrspacecast ptr %at{i} to ptr addrspace({space})")
            buffers.append(f"ptr addrspace({space}) %buffer{i}")
        entry = BITCODE_ENTRY.format(
            name=name, loads="\n  ".join(loads), buffers=", ".join(buffers)
        )
        self._load(text + entry)

    def load_texts(self, texts: dict[str, str]):
        """Loads kernels, by name, in the text that MLX generates for a custom kernel."""
        self._load(compile_texts(texts))

    def _load(self, assembly: str):
        """Loads LLVM assembly, whatever machine it was made for."""
        assembly = re.sub(r"(?m)^(target|@llvm\.global_ctors) .*", "", assembly)
        module = llvm.parse_assembly(assembly)
        module.verify()
        self._engine.add_module(module)
        self._engine.finalize_object()

    def run(
        self, name: str, n_threadgroups: int, buffers: Sequence[Array | None], output: int
    ) -> Run:
        """Runs a kernel.

        Args:
            n_threadgroups: of two simdgroups each, along y.
            buffers: the arguments; None for what the kernel does not use.
            output: which of them it writes.
        """
        guarded = [None if array is None else _Guarded(array) for array in buffers]
        addresses = (ctypes.c_void_p * len(buffers))(*(each and each.address for each in guarded))
        calls = np.zeros(n_threadgroups * N_SIMDGROUPS, np.uint32)
        log = np.empty((calls.size * MAX_CALLS, N_LANES), np.float32)
        entry = self._engine.get_function_address(f"lane {name}")
        self._run(entry, addresses, n_threadgroups, calls.ctypes.data, log.ctypes.data)
        written = guarded[output]
        return Run(written.read(), log[: calls.sum()].copy(), calls)

    def run_grid(
        self, name: str, n_y: int, n_z: int, buffers: Sequence[Array], n_outputs: int
    ) -> tuple[list[Array], Array]:
        """Runs a kernel whose sums depend on each other.

        Args:
            n_y, n_z: the grid; each place is a simdgroup along x.
            n_outputs: how many of the last buffers it writes.

        Returns:
            The outputs, and the operands of all calls (simdgroups, calls, lanes), zeros after the
            last one.
        """
        guarded = [_Guarded(array) for array in buffers]
        addresses = (ctypes.c_void_p * len(buffers))(*(each.address for each in guarded))
        log = np.empty((n_y * n_z, MAX_CALLS, N_LANES), np.float32)
        entry = self._engine.get_function_address(f"lane {name}")
        self._run_grid(entry, addresses, n_y, n_z, log.ctypes.data)
        return [each.read() for each in guarded[-n_outputs:]], log


def make_machine() -> llvm.TargetMachine:
    """What LLVM assembly is compiled for."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    return target.create_target_machine(cpu="x86-64-v3", opt=2)


class _Guarded:
    """A copy of an array that ends at a page which cannot be accessed."""

    def __init__(self, array: Array):
        self._array = array
        size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pages = mmap.mmap(-1, size + mmap.PAGESIZE)
        end = ctypes.addressof(ctypes.c_char.from_buffer(self._pages)) + size
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0):
            raise OSError("mprotect failed")
        self.address = end - array.nbytes
        ctypes.memmove(self.address, array.ctypes.data, array.nbytes)

    def read(self) -> Array:
        data = ctypes.string_at(self.address, self._array.nbytes)
        return np.frombuffer(data, self._array.dtype).reshape(self._array.shape)


def compile_texts(texts: dict[str, str]) -> str:
    """The LLVM assembly of kernels, by name, in the text that MLX generates for them."""
    parts = ['#include "metal.h"\n']
    for i, (name, text) in enumerate(texts.items()):
        (kernel,) = re.findall(r"(.*)\ntemplate \[\[host_name.* decltype\((.*?)\)", text, re.DOTALL)
        body, instance = kernel
        signature = body[body.index("[[kernel]]") :]
        arguments = []
        for kind, attribute, buffer in re.findall(PARAMETER, signature, re.MULTILINE):
            pointer = f"({kind.replace('&', '*')})buffers[{buffer}]"
            value = f"*{pointer}" if kind.endswith("&") else pointer
            arguments.append(value if buffer else f"place.{attribute}")
        call = f"{instance}({', '.join(arguments)})"
        parts.append(TEXT_ENTRY.format(i=i, name=name, text=body, call=call))
    return _compile("".join(parts))


def _compile(text: str) -> str:
    """The LLVM assembly of a text in C++."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "text.cpp"
        source.write_text(text)
        result = source.with_suffix(".ll")
        done = subprocess.run([*COMPILE, source, "-o", result], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        return result.read_text()
