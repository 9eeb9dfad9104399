"""Rates of a device per second: as probed here, or as its maker documents it.

Sources: NVIDIA's and AMD's data sheets, dense products with fp32 accumulation, memory bandwidth, one direction of the
links between devices. A large product reaches ATTAINED of the documented rate, and a kernel that only reads and writes
ATTAINED of the bandwidth. Of these devices an H200 was measured: 0.80 and 0.64.
"""

import re
from dataclasses import dataclass, field, replace

from finetune.errors import PlanError
from finetune.estimate.budget import GIB, parse_size

ATTAINED = 0.7
LAUNCH_SECONDS = 23e-6  # of host time per operator of an accelerator, its part of autograd included: beside an H200
# What a step on an accelerator reaches of its probes: products of its sizes, an operator of a layer. Fitted on a Llama
# of 1.2B on an H200 (LoRA and QLoRA, 1,224 and 8,000 tokens), each within 9 %.
PRODUCT_OF_ACCELERATOR = 0.7
OPERATOR_OF_ACCELERATOR = 3.4
# What a step on a CPU reaches of what one thread's probes saw: products of its sizes, small ones of attention, kernels
# that compute of each element, an operator from Python with what autograd records. HALF_OF_CPU: of the second and third
# in 16 bits, which are computed in 32. Fitted on 54 runs of one thread (an EPYC; Llamas of width 256 to 1,024, three
# train types, bf16 and fp32), each within 16 %; 33 of other widths were predicted 19 % too fast to 3 % too slow.
PRODUCT_OF_CPU = 0.85
ATTENTION_OF_CPU = 0.45
ELEMENTWISE_OF_CPU = 0.42
OPERATOR_OF_CPU = 17
HALF_OF_CPU = 0.65
SECOND_THREAD = 0.3  # of a physical core's speed, that its second thread adds
MOST_STREAMS = 4  # threads that saturate the host's memory
MEASURED = "measured here"


@dataclass(frozen=True)
class Rates:
    """Rates of one rank's device. `products`: FLOP/s of large matrix products by precision; `memory`: bytes/s read and
    written by a kernel; `elementwise`: by one that computes of each element; `attention`: FLOP/s of its products, of
    those of large ones; `half`: what these two reach in 16 bits, of themselves in 32; `launch`: seconds of host time
    per operator; `host_link`: bytes/s to host memory, one way; `disk`: of files, assumed where none is read.
    `runs_ahead`: the host starts operators while the device computes. `contention`: how much faster a rank computes
    while the others of its cores wait. `source`: where the numbers are from.
    """

    products: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0
    launch: float = LAUNCH_SECONDS
    host_link: float = 20e9
    disk: float = 2e9
    elementwise: float | None = None  # None: memory
    attention: float = 1.0
    half: float = 1.0
    runs_ahead: bool = True
    contention: float = 1.0
    source: str = ""

    def between(self, precision: str) -> float:
        """Bytes/s of what computes between the products."""
        return (self.elementwise or self.memory) * self._of_width(precision)

    def attention_flops(self, precision: str) -> float:
        return self.attention * self.flops(precision) * self._of_width(precision)

    def _of_width(self, precision: str) -> float:
        if precision == "fp32":
            return 1.0
        return self.half

    def flops(self, precision: str) -> float:
        """FLOP/s of products in 'fp32', 'bf16' or 'fp16'; fp16's are bf16's where only those are known, and the
        reverse.
        """
        other = {"fp16": "bf16", "bf16": "fp16"}.get(precision, "fp32")
        return self.products.get(precision) or self.products.get(other) or self.products["fp32"]


@dataclass(frozen=True)
class Links:
    """Bandwidth and latency between ranks: bytes/s per rank and direction, within a host and between hosts; seconds per
    call.

    `hides`: a collective overlaps with the matmuls of the next layer.
    """

    near: float
    far: float
    latency: float = 20e-6
    per_host: int = 8
    hides: bool = True
    name: str = ""


@dataclass(frozen=True)
class Device:
    """A documented device: GB of memory, TFLOP/s in 16 bits and in fp32, GB/s of its memory, its usual link.
    `is_apple`: a chip whose GPU shares the memory of the system; the memory is that of its common configuration.
    `has_bf16`: it multiplies bf16; NVIDIA's before Ampere do not. `reported_gib`: GiB that its driver reports, of cards
    whose memory keeps its own error correction; None: about one percent less than the GiB it is sold as.
    """

    memory_gb: float
    half: float
    single: float
    bandwidth: float
    link: str = "pcie"
    is_apple: bool = False
    has_bf16: bool = True
    reported_gib: float | None = None


def _apple(memory_gb: float, teraflops: float, bandwidth: float) -> Device:
    """An Apple chip, whose GPU multiplies 16 bits no faster than 32."""
    return Device(memory_gb, teraflops, teraflops, bandwidth, is_apple=True)


DEVICES = {
    "t4": Device(16, 65, 8.1, 320, has_bf16=False, reported_gib=14.56),
    "v100": Device(32, 125, 15.7, 900, "nvlink", has_bf16=False),
    "l4": Device(24, 121, 30.3, 300, reported_gib=22.0),
    "a10": Device(24, 125, 31.2, 600, reported_gib=22.0),
    "rtx3090": Device(24, 71, 35.6, 936),
    "rtx4090": Device(24, 165, 82.6, 1008),
    "rtx5090": Device(32, 210, 104.8, 1792),
    "a6000": Device(48, 155, 38.7, 768),
    "l40s": Device(48, 362, 91.6, 864, reported_gib=44.4),
    "a100-40gb": Device(40, 312, 19.5, 1555, "nvlink"),
    "a100": Device(80, 312, 19.5, 2039, "nvlink"),
    "h100": Device(80, 989, 67, 3350, "nvlink"),
    "h200": Device(141, 989, 67, 4800, "nvlink"),
    "b200": Device(180, 2250, 80, 8000, "nvlink"),
    "mi300x": Device(192, 1307, 163, 5300, "nvlink"),
    "m1": _apple(16, 2.6, 68),
    "m1-pro": _apple(32, 5.3, 200),
    "m1-max": _apple(64, 10.6, 400),
    "m1-ultra": _apple(128, 21.2, 800),
    "m2": _apple(24, 3.6, 100),
    "m2-pro": _apple(32, 6.8, 200),
    "m2-max": _apple(96, 13.6, 400),
    "m2-ultra": _apple(192, 27.2, 800),
    "m3": _apple(24, 3.5, 100),
    "m3-pro": _apple(36, 6.4, 150),
    "m3-max": _apple(128, 14.2, 400),
    "m3-ultra": _apple(256, 28.4, 819),
    "m4": _apple(32, 4.3, 120),
    "m4-pro": _apple(48, 8.6, 273),
    "m4-max": _apple(128, 17.2, 546),
}
ALSO = {"a100-80gb": "a100", "h100-80gb": "h100", "a10g": "a10"}
# Taken where only the memory is known: the first with as much of it.
BY_MEMORY = ("t4", "rtx4090", "rtx5090", "a100-40gb", "l40s", "a100", "h200", "mi300x")
# GB/s of one rank in one direction: between devices of a host, and between hosts.
WITHIN_HOST = {"nvlink": 300, "pcie": 16}
BETWEEN_HOSTS = {"ib": 40, "ethernet": 3}
RANKS_PER_HOST = 8
# Bytes/s of Gloo over loopback, which the ranks' cores copy: 36 runs of 1, 2 and 4 ranks on two cores of an EPYC.
GLOO_OF_CORE = 0.33e9
# not measured; 1 Gbit/s
GLOO_BETWEEN_HOSTS = 0.1e9
GLOO_CALL = 150e-6


def documented(name: str) -> Rates:
    """Rates of a device of DEVICES. Raises PlanError for another name."""
    found = _device(name)
    half = found.half * 1e12 * ATTAINED
    single = found.single * 1e12 * ATTAINED
    products = {"bf16": half, "fp16": half, "fp32": single}
    return Rates(products, found.bandwidth * 1e9 * ATTAINED, source=f"{name.upper()}, as documented")


def device_of_memory(memory_bytes: int) -> str:
    """A common device with this much memory or a little more: what is assumed where only the memory is given."""
    gigabytes = memory_bytes / 1e9
    return next((name for name in BY_MEMORY if DEVICES[name].memory_gb * 1.08 >= gigabytes), BY_MEMORY[-1])


def links_of(word: str | None, device: str, per_host: int = RANKS_PER_HOST) -> Links:
    """Links by --assume_interconnect: a word for one of the two, or bytes/s such as 25GB for both; the other one, and
    both without it, are the device's usual ones. Raises PlanError.
    """
    usual = _device(device).link
    near = usual
    far = "ib" if usual == "nvlink" else "ethernet"
    if word is None or word in WITHIN_HOST:
        near = word or near
    elif word in BETWEEN_HOSTS:
        far = word
    elif re.fullmatch(r"[\d.]+\s*[KMGT]?i?B", word, re.I):
        rate = float(parse_size(word, "--assume_interconnect"))
        return Links(rate, rate, per_host=per_host, name=f"{rate / 1e9:g} GB/s between ranks")
    else:
        known = ", ".join((*WITHIN_HOST, *BETWEEN_HOSTS))
        raise PlanError(
            f"--assume_interconnect {word}: not known. Use one of {known}, or bytes per second such as 25GB."
        )
    return Links(
        WITHIN_HOST[near] * 1e9, BETWEEN_HOSTS[far] * 1e9, per_host=per_host, name=f"{near}, {far} between hosts"
    )


def of_accelerator(products: dict[str, float], memory: float, operator: float, host_link: float | None = None) -> Rates:
    """Rates of an accelerator, from what `backend.probes` saw of it: FLOP/s of `products` by precision, bytes/s of a
    copy, seconds to start an operator, bytes/s from host memory if that was tried.
    """
    reached = {name: PRODUCT_OF_ACCELERATOR * value for name, value in products.items()}
    link = host_link or Rates.host_link
    return Rates(reached, memory, OPERATOR_OF_ACCELERATOR * operator, link, source=MEASURED)


def of_cpu(
    products: dict[str, float],
    memory: float,
    operator: float,
    threads: int,
    ranks: int = 1,
    cores: int = 1,
    physical_cores: int | None = None,
) -> Rates:
    """Rates of one of the `ranks` processes that compute on a CPU with `threads` each, from what `backend.probes` saw
    of one thread: FLOP/s of `products` by precision, bytes/s of a copy, seconds of an operator. `cores`: logical ones.
    """
    physical = physical_cores or cores
    share = _cores_busy(ranks * threads, cores, physical) / ranks
    scaled = {name: PRODUCT_OF_CPU * value * share for name, value in products.items()}
    if "onednn" in scaled:
        scaled["fp32"] = max(scaled["fp32"], scaled["onednn"])
    waiting = max(1.0, threads / share)  # for a core that other threads compute on
    return Rates(
        scaled,
        memory * min(share, MOST_STREAMS),
        OPERATOR_OF_CPU * operator * waiting,
        elementwise=ELEMENTWISE_OF_CPU * memory * min(share, MOST_STREAMS),
        attention=ATTENTION_OF_CPU,
        half=HALF_OF_CPU,
        runs_ahead=False,
        contention=_cores_busy(threads, cores, physical) / share,
        source=MEASURED,
    )


def _cores_busy(threads: int, cores: int, physical: int) -> float:
    """Threads' speed together, in that of one that has a physical core for itself."""
    return min(threads, physical) + SECOND_THREAD * max(0, min(threads, cores) - physical)


def gloo_links(contention: float, interconnect: str | None = None) -> Links:
    """Links between ranks on CPUs: the copy bandwidth of one core, shared by `contention` ranks, or the bandwidth given
    by --assume_interconnect if that is less. Raises PlanError.
    """
    near = GLOO_OF_CORE / contention
    call = GLOO_CALL * contention
    gloo = Links(near, min(near, GLOO_BETWEEN_HOSTS), call, hides=False, name="Gloo over loopback")
    if interconnect is None:
        return gloo
    given = links_of(interconnect, "a100")
    return replace(gloo, near=min(near, given.near), far=min(near, given.far), name=f"Gloo, {given.name}")


def assumed_memory(device: str) -> int:
    """Bytes of memory of a documented device, see Device.reported_gib. Raises PlanError."""
    found = _device(device)
    return int((found.reported_gib or (1 if found.is_apple else 0.99) * found.memory_gb) * GIB)


def is_apple(device: str | None) -> bool:
    """True for an Apple chip of DEVICES."""
    return device is not None and _device(device).is_apple


def has_bf16(device: str | None) -> bool:
    """False for a card of DEVICES without products in bf16."""
    return device is None or _device(device).has_bf16


def _device(name: str) -> Device:
    """Raises PlanError for a name that is not in DEVICES."""
    words = (name.lower().replace("_", "-").replace(" ", between) for between in ("", "-"))
    found = next((DEVICES[known] for word in words if (known := ALSO.get(word, word)) in DEVICES), None)
    if found is None:
        raise PlanError(
            f"--assume_device {name}: not known. Use one of {', '.join(DEVICES)}, or --assume_memory alone."
        )
    return found
