"""What ops cost on one device: the larger of arithmetic and memory traffic, and an overhead per launch.

The roofline of Williams, Waterman, Patterson 2009 (doi 10.1145/1498765.1498785), with the device's attainable rates.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost_model.hardware import Device
from autopar.errors import PlanError

# Operations per element of pointwise and row-wise ops, to be used as their ``flops``.  Measured on the machine of the
# catalogue's "cpu" entry: time per element of a float32 tensor in the cache, times that entry's ``vector_flops``.
# Ops that are not listed count as one.
ELEMENT_OPS: Mapping[str, float] = {
    "cos": 45,
    "div": 4,
    "erf": 42,
    "exp": 27,
    "gelu": 11,
    "gelu_backward": 25,
    "gelu_tanh": 50,
    "gelu_tanh_backward": 52,
    "log": 33,
    "log_softmax": 15,
    "native_dropout": 190,
    "native_layer_norm": 27,
    "rsqrt": 10,
    "sigmoid": 9,
    "silu": 10,
    "silu_backward": 12,
    "sin": 45,
    "softmax": 19,
    "sqrt": 15,
    "tanh": 86,
    "where": 120,
}

# Bytes of memory traffic per parameter of one optimizer step in float32.  One kernel that reads parameter, gradient and
# state and writes parameter and state: AdamW 4 + 3 floats.  One op after another, as torch.optim without fused=True,
# is the sum over its ops: AdamW's decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4, 20 floats in all.
_OPTIMIZER_TRAFFIC: Mapping[tuple[str, bool], int] = {
    ("adam", True): 28,
    ("adam", False): 72,
    ("adamw", True): 28,
    ("adamw", False): 80,
    ("sgd", True): 12,
    ("sgd", False): 12,
    ("sgd_momentum", True): 20,
    ("sgd_momentum", False): 32,
}
_OPTIMIZER_LAUNCHES: Mapping[str, int] = {"adam": 10, "adamw": 11, "sgd": 1, "sgd_momentum": 3}


def peak_flops(device: Device, dtype: object) -> float:
    """Dense matmul FLOP/s for a dtype, a ``torch.dtype`` or its name; integers and bool count as float32.

    Raises PlanError for a floating dtype that the device has no figure for.
    """
    name = str(dtype).removeprefix("torch.")
    if name.startswith("complex"):
        name = "float64" if name == "complex128" else "float32"
    elif not name.startswith(("float", "bfloat", "tf")):
        name = "float32"
    if name not in device.peak_flops:
        raise PlanError(f"no figure for {name} on {device.name}", expected=", ".join(device.peak_flops), got=name)
    return device.peak_flops[name]


def gemm_efficiency(device: Device, shape: tuple[int, ...] | None = None) -> float:
    """Part of the peak that a matmul of ``shape`` (M, N, K) reaches; of a large one when no shape is given.

    A matmul that is thin in any dimension cannot fill the device's tiles: s / (s + half) for the smallest dimension s.
    """
    if not shape:
        return device.gemm_efficiency
    small = max(min(shape), 1)
    return device.gemm_efficiency * small / (small + device.gemm_half_size)


def op_seconds(
    flops: float,
    bytes_moved: float,
    dtype: object,
    device: Device,
    *,
    gemm: bool,
    shape: tuple[int, ...] | None = None,
    launch: bool = True,
    largest_new: float = 0.0,
) -> float:
    """Seconds of one op on one device, all figures of the local tensors.

    flops         of a matmul, convolution or attention 2 per multiply-add; elsewhere elements times ``ELEMENT_OPS``
    bytes_moved   read and written, once each
    gemm          whether the matmul units do the arithmetic
    shape         (M, N, K) of the matmul, for its efficiency
    launch        False for the later ops of a chain that runs as one kernel
    largest_new   bytes of the largest tensor that the op makes; a CPU pays for new memory above ``fresh_above``

    An op without flops and bytes (a view) costs nothing.  Raises PlanError as ``peak_flops``.
    """
    if not flops and not bytes_moved:
        return 0.0
    peak = peak_flops(device, dtype)
    if gemm:
        rate = peak * gemm_efficiency(device, shape)
    else:
        # float64 is as much slower in vectors as in matmuls; shorter types are converted and computed in float32
        rate = device.vector_flops * min(1.0, peak / peak_flops(device, "float32"))
    time = max(flops / rate, bytes_moved / (device.memory_bandwidth * device.memory_efficiency))
    if largest_new > device.fresh_above:
        time += largest_new / device.fresh_bandwidth
    return time + (device.launch_overhead if launch else 0.0)


def copy_seconds(nbytes: float, device: Device) -> float:
    """Copying ``nbytes`` into new memory: read, written, and on a CPU made available page by page.

    Bundles of weights and gradients are copied so, and are too large for an allocator to keep.
    """
    return 2 * nbytes / (device.memory_bandwidth * device.memory_efficiency) + nbytes / device.fresh_bandwidth


def optimizer_seconds(elements: float, tensors: int, optimizer: str, device: Device, *, fused: bool = False) -> float:
    """Seconds of one optimizer step over ``elements`` local parameters in ``tensors`` tensors, state in float32.

    ``optimizer`` is a name of ``memory.OPTIMIZERS`` other than "none".  ``fused`` is torch's ``fused=True``: one kernel
    per tensor instead of one per operation.  Raises PlanError for an unknown optimizer.
    """
    if (optimizer, fused) not in _OPTIMIZER_TRAFFIC:
        known = ", ".join(sorted(_OPTIMIZER_LAUNCHES))
        raise PlanError("unknown optimizer", where="optimizer_seconds", expected=known, got=optimizer)
    traffic = elements * _OPTIMIZER_TRAFFIC[optimizer, fused]
    launches = tensors * (1 if fused else _OPTIMIZER_LAUNCHES[optimizer])
    return traffic / (device.memory_bandwidth * device.memory_efficiency) + launches * device.launch_overhead
