"""Compiled kernels: C++ sources to a shared library, built once per machine and kept in the user's cache folder.

The library shares torch's OpenMP runtime, so that a process has one pool of threads: it is linked against the very
file that torch has loaded, never against the compiler's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from attention.shared_work import cache_root, only_one

logger = logging.getLogger("quadriga.attention")

SWITCH = "QUADRIGA_KERNELS"
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fvisibility=hidden")
_BUILD_SECONDS = 120
_DIGEST_BYTES = 32

Kernel = ctypes._CFuncPtr
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_local = threading.local()


class NativeError(RuntimeError):
    """Compiled kernels cannot be had here; the message says why."""


@functools.cache
def load_library(*sources: Path) -> ctypes.CDLL:
    """The library made of these sources, compiled now unless an earlier process has done so.

    Raises NativeError when it is switched off, there is no compiler, or the compiler fails.
    """
    if os.environ.get(SWITCH, "on").lower() in ("off", "0", "no", "false"):
        raise NativeError(f"{SWITCH}={os.environ[SWITCH]}")
    compiler, runtime = _find_compiler(), _openmp_runtime()
    headers = sorted(
        header for folder in {Path(__file__).parent, *(s.parent for s in sources)} for header in folder.glob("*.h")
    )
    path = cache_root() / "kernels" / f"kernels-{_fingerprint([*sources, *headers], compiler, runtime)}.so"
    if not _is_sound(path):
        _build_once(sources, compiler, runtime, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"cannot load {path}: {error}") from error


def function(library: ctypes.CDLL, name: str) -> Kernel:
    """A kernel `int64_t name(const int64_t* arguments, Member*)`; what it returns is 0 when all is well."""
    kernel = library[name]
    kernel.restype, kernel.argtypes = ctypes.c_int64, (ctypes.c_void_p, ctypes.c_void_p)
    return kernel


def call(kernel: Kernel, *arguments: int) -> int:
    """Runs a kernel and returns its status. While a recording is made, the call is only noted there."""
    array = (ctypes.c_int64 * len(arguments))(*arguments)
    recording = getattr(_local, "recording", None)
    if recording is None:
        return kernel(array, None)
    recording.calls.append((kernel, array))
    return 0


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a kernel's result."""
    recording = getattr(_local, "recording", None)
    return _fresh(shape, dtype) if recording is None else recording.allocate(shape, dtype)


def _fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


class Recording:
    """Kernel calls in order, with their arguments, to be carried out later and perhaps more than once.

    allocate: gives the memory of results, [shape] of a dtype; it must last as long as the recording is used.
    """

    def __init__(self, allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor] = _fresh) -> None:
        self.allocate = allocate
        self.calls: list[tuple[Kernel, ctypes.Array]] = []

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Notes this thread's calls. Recordings do not nest."""
        _local.recording = self
        try:
            yield
        finally:
            _local.recording = None

    def arrays(self) -> tuple[ctypes.Array, ctypes.Array]:
        """Addresses of the kernels and of their arguments, which the recording keeps."""
        kernels = [ctypes.cast(kernel, ctypes.c_void_p).value for kernel, _ in self.calls]
        arguments = [ctypes.addressof(array) for _, array in self.calls]
        return (ctypes.c_int64 * len(kernels))(*kernels), (ctypes.c_int64 * len(arguments))(*arguments)


def float_bits(value: float) -> int:
    """A double as the integer that carries it to a kernel."""
    return ctypes.c_int64.from_buffer(ctypes.c_double(value)).value


def _find_compiler() -> str:
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    for name in names:
        if path := shutil.which(name):
            return path
    raise NativeError(f"no C++ compiler ({', '.join(names)})")


def _openmp_runtime() -> Path:
    """The OpenMP library that torch runs on."""
    for line in Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self/maps").exists() else []:
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            return Path(path)
    for folder in (Path(torch.__file__).parent / "lib", Path(torch.__file__).parents[1] / "torch.libs"):
        for path in sorted(folder.glob("lib*omp*")):
            return path
    raise NativeError("torch has loaded no OpenMP runtime that kernels could share")


def _fingerprint(files: Sequence[Path], compiler: str, runtime: Path) -> str:
    """What the library depends on: sources, flags, compiler, processor, and where torch's runtime lies."""
    digest = hashlib.sha256()
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=_BUILD_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"cannot run {compiler}: {error}") from error
    parts = [" ".join(_FLAGS).encode(), version.stdout, str(runtime).encode(), _processor().encode()]
    for part in [*parts, *(file.read_bytes() for file in files)]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _processor() -> str:
    """Model and features of the processor, which -march=native compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = [line for line in lines if line.split("\t")[0].strip() in ("model name", "flags", "Features", "CPU part")]
    return platform.machine() + "\n".join(kept)


def _is_sound(path: Path) -> bool:
    """Whether the file is there, whole and this user's own. It ends with the digest of what comes before."""
    try:
        content, owner = path.read_bytes(), path.stat().st_uid
    except OSError:
        return False
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return owner == os.geteuid() and hashlib.sha256(body).digest() == digest


def _build_once(sources: Sequence[Path], compiler: str, runtime: Path, path: Path) -> None:
    """Of all ranks on a machine that need it, one builds and the others wait. Raises NativeError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with only_one(path.with_suffix(".lock"), _BUILD_SECONDS, f"compiling {path.name}"):
            if not _is_sound(path):
                logger.info("compiling %s, once", ", ".join(source.name for source in sources))
                _build(sources, compiler, runtime, path)
    except (OSError, subprocess.TimeoutExpired) as error:  # a lock's timeout is an OSError
        raise NativeError(f"cannot build {path}: {error}") from error


def _build(sources: Sequence[Path], compiler: str, runtime: Path, path: Path) -> None:
    """Compiles to a name of its own and renames it: whoever looks sees a whole file."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="building-", dir=path.parent) as folder:
        built = Path(folder) / "kernels.so"
        command = [compiler, *_FLAGS, "-shared", *map(str, sources), str(runtime), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BUILD_SECONDS)
        if done.returncode != 0:
            raise NativeError(f"{compiler} failed: {_last_error(done.stderr)}")
        body = built.read_bytes()
        built.write_bytes(body + hashlib.sha256(body).digest())
        built.replace(path)
    logger.info("compiled %s in %.1f s: %s", ", ".join(s.name for s in sources), time.perf_counter() - began, path)


def _last_error(text: str) -> str:
    errors = [line for line in text.splitlines() if "error" in line]
    return (errors or text.splitlines() or ["no message"])[0]
