"""What a device must be able to do for an option to have an effect."""

from __future__ import annotations

import importlib.util

import torch

from uniprefill_fx.config import OptionError, PrefillConfig

FP8_CAPABILITY = (8, 9)  # the first NVIDIA GPUs that multiply e4m3 numbers


def runs_kernels() -> bool:
    """Whether the Triton kernels are registered for the device type "cuda": NVIDIA GPUs, and Triton.

    On ROCm, whose devices have the same type, the kernels would not compile (limits of registers, products of TF32 and
    e4m3), and their tiles are cut for other limits.
    """
    nvidia = torch.cuda.is_available() and torch.version.hip is None
    return nvidia and importlib.util.find_spec("triton") is not None


def check_dtypes(config: PrefillConfig, device: torch.device) -> None:
    """Raise OptionError where scores or attention cannot be computed in the type that was asked for."""
    for option, otherwise in (("score_dtype", "'float32' or 'float64'"), ("attention_dtype", "'model'")):
        if getattr(config, option) == "float8_e4m3" and not multiplies_fp8(device):
            needs = "It needs Triton and an NVIDIA GPU of compute capability {}.{} or later.".format(*FP8_CAPABILITY)
            raise OptionError(option, "float8_e4m3", f"{otherwise} for a model on {device}", needs)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the scoring kernel has 8-bit products on `device`."""
    if device.type != "cuda" or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
