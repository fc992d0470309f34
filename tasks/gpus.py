"""The GPUs of a run and what NVML measures of them. The functions take the NVML module (pynvml), which tracking.py loads."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("dflash.gpus")


class GpuLost(Exception):
    """A GPU has fallen off the bus."""


@dataclass(frozen=True)
class Gpu:
    """A device as a process on this machine sees it: a physical GPU, or a MIG instance of one."""

    name: str
    """gpu_3 is what nvidia-smi calls GPU 3; gpu_3_mig_0 its first MIG instance."""
    model: str
    uuid: str
    handle: Any
    physical: Any
    """The handle of the physical GPU, which has the power and the temperature; `handle` itself without MIG."""


def visible_gpus(nvml: Any) -> list[Gpu]:
    """The devices that CUDA_VISIBLE_DEVICES lets a child of this process see, in that order.

    NVML numbers GPUs by PCI bus id, and so does CUDA under CUDA_DEVICE_ORDER=PCI_BUS_ID. CUDA's default puts the fastest first,
    which is the same order among GPUs of one model; with several models, numbers cannot be told without CUDA, which is said.
    A GPU in MIG mode stands for its instances; by its number CUDA sees the first of them.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    found = [_devices(nvml, number, handle) for number, handle in enumerate(handles)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [device for devices in found for device in devices]
    words = [word.strip() for word in visible.split(",")]
    models = {nvml.nvmlDeviceGetName(handle) for handle in handles}
    by_number = any(word.isdecimal() for word in words)
    if by_number and len(models) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        log.warning(
            "CUDA_VISIBLE_DEVICES=%s names GPUs of several models by number: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or the GPU "
            "telemetry may be that of other ones",
            visible,
        )
    chosen = list[Gpu]()
    for word in words:
        matches = _numbered(word, found) if word.isdecimal() else _named(nvml, word, found)
        if not matches:
            break  # CUDA ignores what follows a device that it does not know
        chosen += matches
    return chosen


def _devices(nvml: Any, number: int, handle: Any) -> list[Gpu]:
    """The physical GPU of this number, or its MIG instances."""
    model, own_id = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    try:
        in_mig_mode = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except nvml.NVMLError:  # a GPU that has no such mode
        in_mig_mode = False
    if not in_mig_mode:
        return [Gpu(f"gpu_{number}", model, own_id, handle, handle)]
    instances = list[Gpu]()
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # no instance at this place
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            name = f"gpu_{number}_mig_{place}"
            instances.append(Gpu(name, model, nvml.nvmlDeviceGetUUID(instance), instance, handle))
    return instances


def _numbered(word: str, found: list[list[Gpu]]) -> list[Gpu]:
    return found[int(word)][:1] if int(word) < len(found) else []


def _named(nvml: Any, word: str, found: list[list[Gpu]]) -> list[Gpu]:
    """The device whose id begins with `word`, if only one does."""
    if not re.match("GPU-|MIG-", word):
        return []
    hits = [
        devices[0] if word.startswith("GPU-") else device
        for devices in found
        for device in devices
        if any(own_id.startswith(word) for own_id in _ids(nvml, device))
    ]
    return hits[:1] if len(set(map(id, hits))) == 1 else []


def _ids(nvml: Any, device: Gpu) -> Iterator[str]:
    """Every id of a device: for a MIG instance also its GPU's, and the older MIG-GPU-id/instance/part."""
    yield device.uuid
    if device.handle is not device.physical:
        parent = nvml.nvmlDeviceGetUUID(device.physical)
        yield parent
        instance = nvml.nvmlDeviceGetGpuInstanceId(device.handle)
        yield f"MIG-{parent}/{instance}/{nvml.nvmlDeviceGetComputeInstanceId(device.handle)}"


def gpu_tags(devices: list[Gpu] | None) -> dict[str, str]:
    """Which devices the numbers in the metrics' names are."""
    if devices is None:
        return {"gpu.telemetry": "off"}
    return {"gpu.telemetry": "on"} | {f"gpu.{device.name}": f"{device.model} {device.uuid}" for device in devices}


def read_gpus(nvml: Any, devices: list[Gpu]) -> dict[str, dict[str, float]]:
    """What NVML measures now, by device; what a device does not tell is left out. Raises GpuLost."""
    return {device.name: _read(nvml, device) for device in devices}


def _read(nvml: Any, device: Gpu) -> dict[str, float]:
    values: dict[str, float] = {}
    for read in (_utilisation, _memory, _power, _temperature, _throttling):
        try:
            values |= read(nvml, device)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                raise GpuLost(
                    f"{device.name} ({device.model}, {device.uuid}) is lost: it has fallen off the bus; look for Xid in dmesg, "
                    "then reset the GPU or restart the machine"
                ) from None
    return values


def _utilisation(nvml: Any, device: Gpu) -> dict[str, float]:
    return {"utilisation_percent": nvml.nvmlDeviceGetUtilizationRates(device.handle).gpu}


def _memory(nvml: Any, device: Gpu) -> dict[str, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(device.handle)
    return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}


def _power(nvml: Any, device: Gpu) -> dict[str, float]:
    return {"power_watts": nvml.nvmlDeviceGetPowerUsage(device.physical) / 1000}


def _temperature(nvml: Any, device: Gpu) -> dict[str, float]:
    return {"temperature_celsius": nvml.nvmlDeviceGetTemperature(device.physical, nvml.NVML_TEMPERATURE_GPU)}


def _throttling(nvml: Any, device: Gpu) -> dict[str, float]:
    mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device.physical)
    harmless = nvml.nvmlClocksThrottleReasonGpuIdle | nvml.nvmlClocksThrottleReasonApplicationsClocksSetting
    return {"throttle_mask": mask, "throttle_reasons": (mask & ~harmless).bit_count()}
