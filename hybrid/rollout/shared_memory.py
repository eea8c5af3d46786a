"""A bucket of tensors in anonymous shared memory, in safetensors format.

Anonymous (memfd) rather than a file in /dev/shm: it ends with the process that made it, however that ends, and containers' 64 MiB limit on
/dev/shm does not apply. Other processes of the same user open it as `/proc/<pid>/fd/<fd>`.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket

import torch

SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}


def host_name() -> str:
    """Names a node: processes that share it share memory."""
    return socket.gethostname()


class SharedBucket:
    """Written once, read by others under `path`, gone after `close` (and after the last reader unmaps it)."""

    def __init__(self, bucket: list[tuple[str, torch.Tensor]]):
        self._fd = os.memfd_create("hybrid-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            _write_safetensors(self._fd, bucket)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._fd)


def _write_safetensors(fd: int, bucket: list[tuple[str, torch.Tensor]]) -> None:
    """Header, then each tensor's bytes. `safetensors.save_file` would rename a file into place, which a file descriptor has not."""
    header = {}
    end = 0
    for name, tensor in bucket:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    _write_all(fd, memoryview(len(text).to_bytes(8, "little") + text))
    for _, tensor in bucket:
        flat = tensor.detach().cpu().contiguous()
        _write_all(fd, _bytes_of(flat))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. Not by way of numpy, which would forbid its storage to be emptied ever after."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(fd, view) :]
