"""Variables of a worker process that depend on its role and its node; read by CUDA, NCCL and gloo when they start."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch's CUDA allocator reads the first that is set, vLLM and the rest of torch the second: both always say the same."""
EXPANDABLE = "expandable_segments"
PINNED_CACHED = "pinned_max_cached_size_mb"
PINNED_CACHED_MIB = 64
"""Pinned host memory of at most so many MiB is rounded up to a power of two and kept for reuse. Beyond, torch takes exactly what was asked
for: 9 GiB of DeepSpeed's masters would else lock 16. `pinned_max_round_threshold_mb` alone does not do: torch's free lists hold a power of
two each and give out any block of theirs, also one that is too small."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
HEARTBEAT_S = 1800
"""NCCL's watchdog ends a process whose driver is busy for so long; 480 s by default. Pinning gigabytes of host memory keeps it busy."""

FIXED = ("actor", "rollout")
"""Roles whose segments may not be expandable: the actor exports tensors over CUDA IPC, the engines put memory to sleep."""


@dataclass(frozen=True)
class Place:
    """Where in the run a process is: the device of all roles, its own role and GPU, whether its peers may live on other nodes, and whether
    it stays on the cores beside its GPU."""

    device: str
    role: str
    gpu_id: str
    several_nodes: bool
    beside_gpu: bool = False


def process_environment(
    place: Place, environ: Mapping[str, str], address: str, interfaces: Mapping[str, Sequence[Any]] | None = None
) -> dict[str, str]:
    """Variables to set in the process at `place` whose variables are `environ`, on the node that Ray knows by `address`. `interfaces`: what
    `psutil.net_if_addrs` returns, which is asked when it is None."""
    variables = {}
    if place.device == "cuda":
        # Ray sets it too, but not where the user's RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES forbids it: all would share a GPU.
        variables |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": place.gpu_id}
        variables |= dict.fromkeys(ALLOCATOR, allocator_settings(environ, place.role))
        variables |= {} if environ.get(HEARTBEAT) else {HEARTBEAT: str(HEARTBEAT_S)}
    if place.several_nodes:
        name = interface_of(address, psutil.net_if_addrs() if interfaces is None else interfaces)
        # Left alone, gloo takes what the host's name resolves to: 127.0.1.1 on Debian. NCCL matches beginnings of names without the `=`.
        values = {} if name is None else dict(zip(INTERFACES, (name, f"={name}"), strict=True))
        variables |= {key: value for key, value in values.items() if not environ.get(key)}
    return variables


def allocator_settings(environ: Mapping[str, str], role: str) -> str:
    """The user's settings of torch's allocator with `expandable_segments` as the process of `role` needs it; the others stay.

    Expandable segments let memory that is cut up by small tensors go back to the driver. CUDA IPC of such memory fails in containers, and
    vLLM's sleep mode does not work with it. Roles pin large tensors, and pin them exactly unless the user has said otherwise.
    """
    given = next((environ[name] for name in ALLOCATOR if environ.get(name)), "")
    settings = [each.strip() for each in _split(given)]
    kept = [each for each in settings if each and each.partition(":")[0].strip() != EXPANDABLE]
    if role != "rollout" and not any(each.partition(":")[0].strip() == PINNED_CACHED for each in kept):
        kept.append(f"{PINNED_CACHED}:{PINNED_CACHED_MIB}")
    return ",".join([*kept, f"{EXPANDABLE}:{role not in FIXED}"])


def allocator_problems(environ: Mapping[str, str]) -> Iterator[str]:
    """Settings of torch's allocator under which no memory can be counted or moved."""
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in environ:
        yield (
            f"PYTORCH_NO_CUDA_MEMORY_CACHING={environ['PYTORCH_NO_CUDA_MEMORY_CACHING']} is invalid: torch then counts no memory of the "
            "GPU. Unset it (`unset PYTORCH_NO_CUDA_MEMORY_CACHING`)."
        )
    for name in ALLOCATOR:
        for setting in _split(environ.get(name, "")):
            key, _, value = (each.strip() for each in setting.partition(":"))
            if key == "backend" and value != "native":
                yield (
                    f"{name}={environ[name]} is invalid: the allocator {value} tells nobody what each process holds, and sleep mode "
                    "of vLLM has no pools there. Remove the backend from it."
                )


def _split(settings: str) -> list[str]:
    """`settings` cut at the commas that are outside brackets: a value may be a list, `roundup_power2_divisions:[256:1,512:2]`."""
    parts, depth = [""], 0
    for letter in settings:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def interface_of(address: str, interfaces: Mapping[str, Sequence[Any]]) -> str | None:
    """Name of the network interface that holds `address`; None where none does, as behind address translation."""
    wanted = _address(address)
    for name, addresses in interfaces.items():
        if wanted is not None and any(_address(each.address) == wanted for each in addresses):
            return name
    return None


def _address(text: str) -> Any:
    """An IP address without its zone; None for anything else, such as a hardware address."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
