"""Sends asks from a GPU's stream with the kernels of kernels.cu. Imports torch.

NVRTC, NVIDIA's compiler library, compiles the kernels for the present GPU when a rank starts. NVRTC is part
of torch's CUDA build, so the image needs no compiler.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from heteroinfer_contract.printable import format_bytes
from vllm_heteroinfer.feed_forward.exchange import WATCH_INTERVAL_S, check_ask
from vllm_heteroinfer.feed_forward.slab import Slab

SOURCE: Final = Path(__file__).parent / "kernels.cu"
HEADER: Final = "conversions.cuh"
"""File that CUDA sources include. It is in the folder of the source."""
THREADS: Final = 256
"""Threads of a block."""
PART_BYTES: Final = 16
"""Bytes of a row that a thread copies at once."""
MAX_BLOCKS: Final = 32
"""Maximum number of blocks of a kernel. With this number, enough reads and writes are in flight to use the
whole link, and the rest of the GPU stays free."""
LONG_ROWS, LONG_BLOCKS = 512, 128
"""While experts are copied over the link, an ask of more than LONG_ROWS rows may use LONG_BLOCKS blocks. With
more blocks, the ask gets a larger part of the link beside the copies."""
STATE_WORDS: Final = 4
"""Size of `State` in kernels.cu, in words of 64 bits."""
HOST_REGISTER_MAPPED: Final = 2
"""cudaHostRegisterMapped in CUDA's driver_types.h."""


class Params(ctypes.Structure):
    """The same fields as `Params` in kernels.cu."""

    _fields_ = (
        ("slab", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("padding", ctypes.c_void_p),
        ("x_offset", ctypes.c_uint64),
        ("ids_offset", ctypes.c_uint64),
        ("weights_offset", ctypes.c_uint64),
        ("y_offset", ctypes.c_uint64),
        ("y_stride", ctypes.c_uint64),
        ("limit_ns", ctypes.c_uint64),
        ("rows", ctypes.c_uint32),
        ("row_parts", ctypes.c_uint32),
        ("topk", ctypes.c_uint32),
        ("layer", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("limit_checks", ctypes.c_uint32),
    )


class CudaError(RuntimeError):
    """A CUDA call failed. The message contains the name of the call and its status."""


class Kernels:
    """The compiled kernels of the current device."""

    def __init__(self, device: torch.device, source: Path = SOURCE) -> None:
        """Compiles the kernels of a file for this device and loads them."""
        major, minor = torch.cuda.get_device_capability(device)
        image = compile_source(source, f"sm_{major}{minor}")
        self._driver = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        torch.cuda.current_stream(device).synchronize()  # creates the context
        self._raise_if_failed(self._driver.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
        self._module = module
        self._launch = self._driver.cuLaunchKernel
        # Function; 3 sizes of the grid, 3 sizes of a block, shared memory; stream, arguments, options.
        self._launch.argtypes = (ctypes.c_void_p, *(ctypes.c_uint,) * 7, *(ctypes.c_void_p,) * 3)

    def function(self, name: str) -> ctypes.c_void_p:
        """Returns a kernel by its name."""
        address = ctypes.c_void_p()
        status = self._driver.cuModuleGetFunction(ctypes.byref(address), self._module, name.encode())
        self._raise_if_failed(status, "cuModuleGetFunction")
        return address

    def launch(
        self, function: ctypes.c_void_p, blocks: int | tuple[int, int, int], arguments: Any, stream: int
    ) -> None:
        """Puts a kernel into a stream.

        Args:
            blocks: number of thread blocks, or their number in each of three dimensions.
            arguments: array of pointers to the kernel's arguments.
        """
        grid = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        status = self._launch(function, *grid, THREADS, 1, 1, 0, stream, arguments, None)
        self._raise_if_failed(status, "cuLaunchKernel")

    def device_address(self, address: int) -> int:
        """Returns the address at which the device sees host memory of `register_memory`."""
        on_device = ctypes.c_uint64()
        status = self._driver.cuMemHostGetDevicePointer_v2(
            ctypes.byref(on_device), ctypes.c_void_p(address), 0
        )
        self._raise_if_failed(status, "cuMemHostGetDevicePointer")
        return on_device.value

    @staticmethod
    def _raise_if_failed(status: int, call: str) -> None:
        """Raises CudaError for a status other than 0. `call` is the name of the CUDA function."""
        if status:
            raise CudaError(
                f"{call} failed with CUDA error {status}. Check the GPU and its driver with nvidia-smi"
            )


def register_memory(memory: torch.Tensor) -> None:
    """Pins host memory and maps it for the current device; raises CudaError if CUDA refuses this."""
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, HOST_REGISTER_MAPPED)
    if int(status) != 0:
        raise CudaError(
            f"cudaHostRegister failed with CUDA error {status}: the GPU cannot access "
            f"{format_bytes(memory.nbytes)} of host memory. Raise the pod's memory limit, or the limit of "
            "locked memory (ulimit -l)"
        )


def _pointers_to(params: ctypes.Structure) -> Any:
    """Returns the arguments of a kernel with the parameter `params`, which must outlive the result."""
    return (ctypes.c_void_p * 1)(ctypes.addressof(params))


class CudaExchange:
    """Sends asks from the current stream, so that CUDA graphs can capture them."""

    def __init__(self, slab: Slab, device: torch.device, *, limit_s: float) -> None:
        """Compiles the kernels, maps the slab for the device, and prepares the kernels' parameters.

        Args:
            limit_s: seconds after which a kernel that waits for an answer gives up. Usually the host's
                `FeedForwardWatch` (exchange.py) finds a late rank earlier. In a frozen pod the GPU's clock
                continues, but ranks do not run. So a kernel gives up only after the watch has also made
                as many checks as it makes in `limit_s`.

        Raises:
            CudaError: the device cannot map the slab, or NVRTC cannot compile the kernels.
        """
        self.slab = slab
        self._device = device
        with torch.cuda.device(device):
            register_memory(slab.bytes)
            self._kernels = Kernels(device)
            # This memory is outside of the pool that vLLM's sleep mode empties, because it has the number of
            # asks, which must never decrease.
            self._state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=device)
        self._ask_kernel, self._sum_kernel = (
            self._kernels.function("ff_ask"),
            self._kernels.function("ff_get"),
        )
        self._device_index = torch.cuda.current_device() if device.index is None else device.index
        layout = slab.layout
        self._fixed_params = {
            "slab": self._kernels.device_address(slab.address),
            "state": self._state.data_ptr(),
            "x_offset": layout.x,
            "ids_offset": layout.ids,
            "weights_offset": layout.weights,
            "y_offset": layout.y,
            "y_stride": layout.y_stride,
            "limit_ns": int(limit_s * 1e9),
            "row_parts": slab.shape.row_bytes // PART_BYTES,
            "topk": slab.shape.topk,
            "lanes": slab.shape.lanes,
            "dtype": layout.dtype,
            "limit_checks": int(limit_s / WATCH_INTERVAL_S),
        }

    def ask(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sends an ask and returns the answer, which is valid once the stream has received the answer."""
        return self.send(layer, x, ids, weights, padding)()

    def send(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        padding: torch.Tensor | None,
        *,
        beside_copies: bool = False,
    ) -> Callable[[], torch.Tensor]:
        """Sends an ask. Returns a function that makes the stream wait for the answer.

        This function returns the answer, which is valid once the stream has waited. Between the two calls,
        the stream can compute something else.

        Args:
            beside_copies: whether experts are copied over the link to the GPU at the same time. Then a long
                ask gets more blocks.
        """
        check_ask(self.slab.shape, x, ids)
        out = torch.empty_like(x)
        rows = x.shape[0]
        params = Params(
            x=x.data_ptr(),
            ids=None if ids is None else ids.data_ptr(),
            weights=None if weights is None else weights.data_ptr(),
            out=out.data_ptr(),
            padding=None if padding is None else padding.data_ptr(),
            rows=rows,
            layer=layer,
            **self._fixed_params,
        )
        arguments = _pointers_to(params)
        num_parts = rows * self._fixed_params["row_parts"]  # a thread copies one part at once
        wanted_blocks = -(-num_parts // THREADS)
        max_blocks = LONG_BLOCKS if beside_copies and rows > LONG_ROWS else MAX_BLOCKS
        blocks = max(1, min(max_blocks, wanted_blocks))
        stream = int(torch._C._cuda_getCurrentRawStream(self._device_index))
        self._kernels.launch(self._ask_kernel, blocks, arguments, stream)

        def receive() -> torch.Tensor:
            """Puts the kernel that waits for the answer into the stream, and returns the answer."""
            self._kernels.launch(self._sum_kernel, blocks, _pointers_to(params), stream)
            return out

        return receive


@functools.cache
def compile_source(source: Path, architecture: str) -> bytes:
    """Compiles a file of CUDA source, which may include HEADER, to machine code.

    Args:
        architecture: such as `sm_90`.

    Raises:
        CudaError: NVRTC is missing, or rejected the source.
    """
    nvrtc = _load_nvrtc()
    program = ctypes.c_void_p()
    header_texts = (ctypes.c_char_p * 1)((source.parent / HEADER).read_bytes())
    header_names = (ctypes.c_char_p * 1)(HEADER.encode())
    status = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), 1, header_texts, header_names
    )
    if status:
        raise CudaError(f"{source.name}: NVRTC cannot read this file (error {status}). Report this error")
    try:
        options = (f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status:
            raise CudaError(
                f"{source.name}: NVRTC cannot compile this file for {architecture} (error {status}: "
                f"{_compile_log(nvrtc, program)}). Report this error, and name the GPU"
            )
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _compile_log(nvrtc: Any, program: ctypes.c_void_p) -> str:
    """Returns the compiler's messages about a program."""
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _load_nvrtc() -> Any:
    """Loads NVRTC from torch's packages or from the system."""
    problems = []
    for candidate in _nvrtc_files():
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            problems.append(str(error))
    raise CudaError(
        f"libnvrtc: not found ({'; '.join(problems)}). Install the nvidia-cuda-nvrtc package that torch needs"
    )


def _nvrtc_files() -> Iterator[str]:
    """Yields paths and names of files that may be NVRTC, first the files in torch's packages.

    Before this function yields a file of a package, it loads libnvrtc-builtins from the same folder, because
    NVRTC itself does not search this folder.
    """
    for folder in sys.path:
        for file in sorted(Path(folder).glob("nvidia/*/lib/libnvrtc.so.1*")):
            builtins = sorted(file.parent.glob("libnvrtc-builtins.so.*"))
            if builtins:
                ctypes.CDLL(str(builtins[0]), mode=ctypes.RTLD_GLOBAL)
            yield str(file)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so")
