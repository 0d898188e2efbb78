"""A GPU in name: tensors on `fakegpu` hold CPU tensors, and mix with those of the CPU no better than CUDA's do.

Every operator runs on the CPU, so its numbers are the CPU's. What CUDA would refuse is refused: an operator that gets tensors
of both devices, an index of the other one. What would make the host wait for the device is counted in `waits`, by the line
that asked for it. Importing this module gives the process the device; it cannot be taken away, so it belongs into a process
of its own.
"""

from __future__ import annotations

import collections
import contextlib
import linecache
import traceback
from collections.abc import Iterator
from typing import Any

import safetensors.torch
import torch
import transformers.pytorch_utils
from torch import Tensor
from torch._decomp.decompositions import gru_impl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "fakegpu"


class Backend(_DummyBackendModule):
    """What PyTorch asks of the module torch.fakegpu."""

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return 2**30, 2**30

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        """The only generator is the CPU's, which PyTorch restores itself."""


_setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
DEVICE = torch.device(NAME, 0)
waits: collections.Counter[str] = collections.Counter()

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
# Of an indexed tensor's own device, or of the CPU: CUDA copies such an index first.
INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
# The shape of what these return, or the number, depends on values.
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}


class Generator(torch.Generator):
    """A generator of the CPU that remembers which device it was made for."""

    def __new__(cls, device: torch.device | str = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made.made_for = torch.device(device).type
        return made


class OnDevice(Tensor):
    """A tensor that says it is on the device, and holds one of the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        made.held = held
        return made

    # PyTorch takes a class with these two for one that modules can be moved to and from.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> OnDevice:
        return OnDevice(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = OnDevice(self.held.detach().clone(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        waits[asking()] += 1
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"cannot convert a tensor on {NAME} to numpy")


def unwrapped(value: Any) -> Any:
    """The value, or the tuple, list or dict of values, as operators get them, with the tensors that are held."""
    if isinstance(value, OnDevice):
        return value.held
    if isinstance(value, tuple | list):
        return type(value)(map(unwrapped, value))
    return {key: unwrapped(v) for key, v in value.items()} if isinstance(value, dict) else value


def wrapped(value: Any) -> Any:
    """What an operator returns, with its tensors on the device."""
    if isinstance(value, tuple | list):
        return type(value)(map(wrapped, value))
    return OnDevice(value) if isinstance(value, Tensor) and not on_device(value) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def asking() -> str:
    """The innermost line of tomoe or else of transformers that is running."""
    # as plain frames: the text of all their lines takes longer than most operators
    frames = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_stack(None)]
    for package in ("/tomoe/", "/transformers/"):
        for file, number in frames:
            if package in file:
                return f"{file.split(package)[-1]}:{number} {linecache.getline(file, number).strip()}"
    return str(frames[-1])


def on_device(value: object) -> bool:
    return isinstance(value, OnDevice)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the tensors that are held, after the checks of a device; give the result its device."""
    tensors = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
    asked = kwargs.get("device")
    if not any(map(on_device, tensors)) and (asked is None or torch.device(asked).type != NAME):
        return func(*args, **kwargs)
    stays = asked is None or torch.device(asked).type == NAME
    if func in INDEXING:
        check_index(args)
    elif func not in COPIES and any(map(on_device, tensors)) and not all(on_device(t) or not t.dim() for t in tensors):
        raise RuntimeError(f"{func} got tensors of {NAME} and of the CPU: {asking()}")
    leaves = (func is aten._to_copy.default and not stays) or (func is aten.copy_.default and not on_device(args[0]))
    if leaves or func in WAITING:
        waits[asking()] += 1
    if asked is not None:
        kwargs = kwargs | {"device": "cpu"}
    kwargs.pop("pin_memory", None)
    plain = unwrapped(args)
    if func is aten.histc.default:
        # Of integers CUDA counts them, too.
        result = func(plain[0].float(), *plain[1:], **kwargs).to(plain[0].dtype)
    else:
        result = func(*plain, **unwrapped(kwargs))
    if not stays:
        return result
    # PyTorch takes a millisecond to find out that an operator in place returns its first argument.
    name = func._schema.name
    in_place = name.endswith("_") and not name.endswith("__") and torch.Tag.inplace_view not in func.tags
    if leaves or (in_place and isinstance(result, Tensor)):
        return args[0]
    return return_and_correct_aliasing(func, args, kwargs, wrapped(result))


def check_index(args: tuple[Any, ...]) -> None:
    """Raise what CUDA raises for an index or values of another device, and count a mask, whose size the host must know."""
    indexed, ids = args[0], [t for t in args[1] if t is not None]
    if not on_device(indexed) and any(map(on_device, ids)):
        raise RuntimeError(f"indices on {NAME} of a tensor on the CPU: {asking()}")
    if on_device(indexed) and len(args) > 2 and not on_device(args[2]) and args[2].dim():
        raise RuntimeError(f"values on the CPU are put into a tensor on {NAME}: {asking()}")
    if any(on_device(t) and t.dtype in (torch.bool, torch.uint8) for t in ids):
        waits[asking()] += 1


class Dispatch(TorchDispatchMode):
    """Operators that get no tensor of the device yet: copies to it and new tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _lists_on_device(index: Any) -> Any:
    """An index with its lists as tensors on the device, to which indexing copies them."""
    if isinstance(index, tuple):
        return tuple(map(_lists_on_device, index))
    return OnDevice(torch.tensor(index)) if isinstance(index, list) else index


class Functions(TorchFunctionMode):
    """What operators do not show: whose a generator is, lists as indices, what is put into `data` or a new tensor."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(generator := kwargs.get("generator"), Generator):
            fake = any(map(on_device, args)) or str(kwargs.get("device")).startswith(NAME)
            if generator.made_for != (NAME if fake else "cpu"):
                raise RuntimeError(f"a generator of another device: {asking()}")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and on_device(args[0]):
            args = (args[0], _lists_on_device(args[1]), *args[2:])
        if func == Tensor.data.__set__ and on_device(args[0]) != on_device(args[1]):
            # A tensor's class changes with its device here, which `data` cannot do.
            return torch.utils.swap_tensors(args[0], torch.nn.Parameter(args[1], args[0].requires_grad))
        if func is Tensor.new_tensor and on_device(args[0]):
            return OnDevice(torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs))
        if func in (torch.tensor, torch.as_tensor) and str(kwargs.get("device")).startswith(NAME):
            return func(*args, **kwargs | {"device": "cpu"}).to(NAME)
        return func(*args, **kwargs)


@contextlib.contextmanager
def fake_device() -> Iterator[None]:
    """Inside the block the device can be used."""
    with Functions(), Dispatch():
        yield


def _of_held(function: Any) -> Any:
    """A function of tensors that looks into their memory, on those that are held."""

    def on_held(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return function(tree_map(lambda t: unwrapped(t.detach()), tensors), *args, **kwargs)

    return on_held


for module in (safetensors.torch, transformers.pytorch_utils):
    for name in ("save", "save_file", "storage_ptr", "storage_size"):
        if hasattr(module, name):
            setattr(module, name, _of_held(getattr(module, name)))
torch.Generator = Generator
# cuDNN has no counterpart here.
torch._VF.gru = gru_impl
# In inference mode operators arrive that are made of others.
torch.inference_mode = torch.no_grad
