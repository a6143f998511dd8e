"""Any view comes back with its values, shape and strides from the bytes that were moved for it."""

import pytest
import torch

from sppo_hf.offload.copy_streams import HostCopier
from sppo_hf.offload.engine import OffloadEngine
from sppo_hf.offload.host_memory import HostPool

VIEWS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "sliced": lambda t: t[1:3, :, 2:7],
    "one row": lambda t: t[2],
    "steps": lambda t: t[::2, ::3],
    "expanded": lambda t: t[0, 0].expand(9, 5, -1),
    "narrow column": lambda t: t[:, :, 3],
    "flipped dims": lambda t: t.permute(2, 0, 1)[1:],
    "one element": lambda t: t[3, 4, 5],
}
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views_come_back_as_they_were(view: str, dtype: torch.dtype) -> None:
    engine = OffloadEngine(HostCopier(), HostPool(2**16), min_offload_elements=1)
    tensor = VIEWS[view](torch.arange(4 * 6 * 10).reshape(4, 6, 10).to(dtype))
    handle = engine.start_offload(tensor)
    assert handle.is_offloaded
    back = engine.wait_for(handle)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()
    assert back.dtype == dtype
    assert back.data_ptr() != tensor.data_ptr()
