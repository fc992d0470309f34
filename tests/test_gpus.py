import types

import pytest
import torch

from tasks import tracking
from tasks.gpus import GpuLost, gpu_tags, read_gpus, visible_gpus


class NvmlError(Exception):
    def __init__(self, value):
        self.value = value


NOT_SUPPORTED, LOST = 3, 15


def nvml_of(*models, instances=(), lost=()):
    """The surface of pynvml for GPUs of these models; the last one is in MIG mode if it has instances."""

    def instance(gpu, place):
        if place >= len(instances):
            raise NvmlError(6)
        return f"{gpu}.{place}"

    def physical_only(value):
        def read(handle, *_):
            if "." in handle:
                raise NvmlError(NOT_SUPPORTED)
            if handle in lost:
                raise NvmlError(LOST)
            return value(handle)

        return read

    last = str(len(models) - 1)
    return types.SimpleNamespace(
        NVMLError=NvmlError,
        NVML_ERROR_GPU_IS_LOST=LOST,
        NVML_TEMPERATURE_GPU=0,
        nvmlClocksThrottleReasonGpuIdle=1,
        nvmlClocksThrottleReasonApplicationsClocksSetting=2,
        nvmlDeviceGetCount=lambda: len(models),
        nvmlDeviceGetHandleByIndex=str,
        nvmlDeviceGetName=lambda handle: models[int(handle[0])],
        nvmlDeviceGetUUID=lambda handle: (
            f"MIG-{instances[int(handle[2])]}" if "." in handle else f"GPU-{handle}ab{handle}"
        ),
        nvmlDeviceGetMigMode=lambda handle: (int(bool(instances) and handle == last), 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetGpuInstanceId=lambda handle: int(handle[2]) + 9,
        nvmlDeviceGetComputeInstanceId=lambda handle: 0,
        nvmlDeviceGetUtilizationRates=physical_only(lambda handle: types.SimpleNamespace(gpu=90 + int(handle))),
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=len(handle), total=100),
        nvmlDeviceGetPowerUsage=physical_only(lambda handle: 70_500),
        nvmlDeviceGetTemperature=physical_only(lambda handle: 60 + int(handle)),
        nvmlDeviceGetCurrentClocksThrottleReasons=physical_only(lambda handle: 0b100101),
    )


@pytest.mark.parametrize(
    "visible, names",
    [
        (None, ["gpu_0", "gpu_1", "gpu_2"]),
        ("", []),
        ("-1", []),
        ("2,0", ["gpu_2", "gpu_0"]),
        (" 1 , 2 ", ["gpu_1", "gpu_2"]),
        ("GPU-2ab2", ["gpu_2"]),
        ("GPU-1,GPU-0ab", ["gpu_1", "gpu_0"]),
        ("0,7,1", ["gpu_0"]),  # CUDA ignores what follows an unknown one
        ("1,GPU-", ["gpu_1"]),  # not the beginning of one id alone
        ("all", []),
    ],
)
def test_gpus_are_those_that_cuda_visible_devices_names_in_its_order(visible, names, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in visible_gpus(nvml_of("H200", "H200", "H200"))] == names


@pytest.mark.parametrize(
    "visible, names",
    [
        (None, ["gpu_0", "gpu_1_mig_0", "gpu_1_mig_1"]),
        ("MIG-beef", ["gpu_1_mig_1"]),
        ("MIG-cafe,0", ["gpu_1_mig_0", "gpu_0"]),
        ("MIG-GPU-1ab1/10/0", ["gpu_1_mig_1"]),
        ("GPU-1ab1", ["gpu_1_mig_0"]),
        ("1", ["gpu_1_mig_0"]),
    ],
)
def test_a_gpu_in_mig_mode_stands_for_its_instances(visible, names, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in visible_gpus(nvml_of("A100", "A100", instances=("cafe1", "beef2")))] == names


def test_memory_is_that_of_the_mig_instance_power_and_temperature_are_its_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = nvml_of("A100", "A100", instances=("cafe1",))
    assert read_gpus(nvml, visible_gpus(nvml)) == {
        "gpu_0": {
            "utilisation_percent": 90,
            "memory_used_bytes": 1,
            "memory_total_bytes": 100,
            "power_watts": 70.5,
            "temperature_celsius": 60,
            "throttle_mask": 0b100101,
            "throttle_reasons": 2,  # idle is none
        },
        "gpu_1_mig_0": {  # no utilisation of an instance
            "memory_used_bytes": 3,
            "memory_total_bytes": 100,
            "power_watts": 70.5,
            "temperature_celsius": 61,
            "throttle_mask": 0b100101,
            "throttle_reasons": 2,
        },
    }


def test_a_lost_gpu_is_said_by_name(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = nvml_of("H200", "H200", lost=("1",))
    with pytest.raises(GpuLost, match=r"gpu_1 \(H200, GPU-1ab1\) is lost"):
        read_gpus(nvml, visible_gpus(nvml))


def test_gpus_of_several_models_by_number_need_cudas_order_to_be_that_of_the_bus(monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    nvml = nvml_of("T4", "H200")
    visible_gpus(nvml)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in caplog.text
    caplog.clear()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    visible_gpus(nvml)
    assert caplog.text == ""


def test_tags_say_which_devices_the_numbers_are(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_tags(visible_gpus(nvml_of("H200", "H200"))) == {"gpu.telemetry": "on", "gpu.gpu_1": "H200 GPU-1ab1"}
    assert gpu_tags(None) == {"gpu.telemetry": "off"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_devices_that_nvml_reads_are_cudas_in_cudas_order():
    devices = tracking.gpus()
    assert devices is not None
    cuda = [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(torch.cuda.device_count())]
    assert [device.uuid for device in devices] == cuda
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda:0")
    values = read_gpus(tracking._nvml(), devices)[devices[0].name]
    assert values["memory_total_bytes"] >= values["memory_used_bytes"] >= held.nbytes
    assert values.keys() >= {"utilisation_percent", "power_watts", "temperature_celsius", "throttle_mask"}
