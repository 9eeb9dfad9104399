"""Tensors on their way through host memory: reused buffers, copies of a device's tensors, and operations in flight."""

import concurrent.futures
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from finetune.parts.engine_limits import FREE_STAGING_BYTES
from finetune.system.threads import in_background

MIB = 2**20


class StagingBuffers:
    """Host memory for tensors in flight, reused: powers of two up to a MiB, then whole MiB, so that shapes share them.
    At most FREE_STAGING_BYTES are kept between operations.
    `copies_cpu`: tensors that are in host memory already are staged too.
    """

    def __init__(self):
        self.free = {}
        self.free_bytes = 0
        self.lock = threading.Lock()
        self.copies_cpu = False

    def stages(self, tensor: torch.Tensor) -> bool:
        return self.copies_cpu or tensor.device.type != "cpu"

    def take(self, num_bytes: int) -> torch.Tensor:
        if num_bytes <= MIB:
            size = 1 << max(12, (num_bytes - 1).bit_length())
        else:
            size = -(-num_bytes // MIB) * MIB
        with self.lock:
            if self.free.get(size):
                self.free_bytes -= size
                return self.free[size].pop()
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        with self.lock:
            if self.free_bytes + buffer.numel() <= FREE_STAGING_BYTES:
                self.free.setdefault(buffer.numel(), []).append(buffer)
                self.free_bytes += buffer.numel()


class Staged:
    """One tensor's copy in host memory, or the tensor itself if it is there already."""

    def __init__(self, buffers: StagingBuffers, tensor: torch.Tensor, copy_in: bool):
        self.buffers = buffers
        self.tensor = tensor.detach()
        self.buffer: torch.Tensor | None = None
        self.host = self.tensor
        if buffers.stages(tensor):
            self.buffer = buffers.take(tensor.nbytes)
            self.host = self.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if copy_in:
                self.host.copy_(self.tensor)
        elif not tensor.is_contiguous():
            self.host = self.tensor.contiguous()

    def copy_back(self) -> None:
        if self.host is not self.tensor:
            self.tensor.copy_(self.host)

    def release(self) -> None:
        if self.buffer is not None:
            self.buffers.give_back(self.buffer)
            self.buffer = None
            self.host = self.tensor


class StagedWork(dist.Work):
    """An operation in flight.

    `diagnosed`: turns a failure of the operation `what` into the error to raise. `pieces`: (Gloo's work, its staged
    inputs, its staged outputs), in the order posted.
    """

    def __init__(self, diagnosed: Callable, what: str, pieces: list, outputs: list):
        super().__init__()
        self.diagnosed = diagnosed
        self.what = what
        self.pieces = pieces
        self.outputs = outputs
        self.lock = threading.Lock()
        self.done = False
        self.error = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the outputs are on their device. Raises what `diagnosed` returns."""
        with self.lock:
            if not self.done:
                self.done = True
                try:
                    self._finish(timeout)
                except RuntimeError as error:
                    self.error = self.diagnosed(self.what, error)
        if self.error:
            raise self.error
        return True

    def _finish(self, timeout: timedelta | None) -> None:
        for work, inputs, outputs in self.pieces:
            work.wait(*([timeout] if timeout else []))
            for staged in outputs:
                staged.copy_back()
            for staged in {id(s): s for s in (*inputs, *outputs)}.values():
                staged.release()
        self.pieces = []

    def is_completed(self) -> bool:
        return self.done or all(work.is_completed() for work, _, _ in self.pieces) and self.wait()

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self):
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list:
        return self.outputs

    def get_future(self) -> torch.futures.Future:
        """Completed by a thread of its own, since the copies back must be made by somebody."""
        future: torch.futures.Future = torch.futures.Future()

        def finish():
            try:
                self.wait()
                future.set_result(self.outputs)
            except RuntimeError as error:
                future.set_exception(error)

        in_background(finish, wait_at_exit=False)
        return future


class Receiving:
    """A receive whose shape is checked first, in a thread: it must be posted at once, and the check has to wait.

    `check` waits for the header and raises if it does not fit; `post` then posts the receive. `previous`: the receive
    of the same source and tag that was asked for before. Gloo pairs messages in the order of posting.
    """

    def __init__(self, check: Callable[[], object], post: Callable, previous: "Receiving | None" = None):
        self.posted = threading.Event()

        def run():
            try:
                check()
                if previous is not None:
                    previous.posted.wait()
                work = post()
            finally:
                self.posted.set()
            work.wait()

        self.received = in_background(run, wait_at_exit=False)

    def wait(self, timeout: timedelta | None = None) -> bool:
        concurrent.futures.wait([self.received], timeout.total_seconds() if timeout else None)
        if not self.received.done():
            raise RuntimeError(f"Timed out waiting {timeout} for recv operation to complete")
        self.received.result()
        return True

    def is_completed(self) -> bool:
        return self.received.done()
