"""The private torch names that only the compiler needs; a process that runs a compiled program never imports this file."""

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["FakeTensor", "FakeTensorMode", "make_fx"]
