"""Compiles the pretended device, once for each version of its sources and of torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
SOURCES = (HERE / "device.cpp", HERE / "nccl.cpp")
COMPILER = os.environ.get("CXX", "g++")


class NoCompiler(RuntimeError):
    """There is no C++ compiler, or it cannot compile the sources."""


@cache
def built() -> Path:
    """Returns the file of the compiled library, which it makes if it is not there.

    Raises:
        NoCompiler: it cannot be made on this machine.
    """
    path = _folder() / "pretended_cards.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # One process compiles, which takes gigabytes; the others wait for it.
            if not path.exists():
                _compile(path)
    return path


def library() -> ModuleType:
    """Returns the library, loaded: from then on torch has kernels for the device "cuda".

    Raises:
        NoCompiler: it cannot be made on this machine.
    """
    spec = importlib.util.spec_from_file_location("pretended_cards", built())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _folder() -> Path:
    """Returns the folder of these sources' library: one for each version, so that nothing old is loaded."""
    content = [torch.__version__, sys.version, *(path.read_text() for path in (*SOURCES, HERE / "device.h"))]
    digest = hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path(tempfile.gettempdir(), f"autotp-tests-{os.getuid()}"))
    return root / "autotp-cards" / digest


def _compile(path: Path) -> None:
    if shutil.which(COMPILER) is None:
        raise NoCompiler(f"no C++ compiler ({COMPILER}), so no cards are pretended")
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-w", "-DTORCH_EXTENSION_NAME=pretended_cards"]
    command += [f"-I{folder}" for folder in includes]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [Path(folder, source.stem + ".o") for source in SOURCES]
        _run_all([[*command, "-c", str(source), "-o", str(out)] for source, out in zip(SOURCES, objects, strict=True)])
        linked = Path(folder, path.name)
        libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", f"-Wl,-rpath,{root}/lib"]
        _run_all([[COMPILER, "-shared", *map(str, objects), "-o", str(linked), f"-L{root}/lib", *libraries]])
        os.replace(linked, path)  # Who does not wait sees a whole library or none.


def _run_all(commands: list[list[str]]) -> None:
    """Runs commands beside each other; raises NoCompiler with the first lines of what one of them said."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        _, errors = process.communicate()
        if process.returncode:
            raise NoCompiler(f"{process.args[0]} failed: {errors[:2000]}")
