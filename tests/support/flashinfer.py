"""FlashInfer without a GPU: its wrapper's arguments, as of version 0.7.4, and what they mean, in torch."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import in_place
from torch import Tensor
from transformers import PreTrainedModel

from paceline.model import loading
from paceline.model.attention import flashinfer
from paceline.model.attention.flashinfer import Library
from paceline.model.compiled import backend
from paceline.model.compiled.backend import Backend, DeviceBackend, HostBackend
from paceline.model.loading import LoadedModel, prepare
from paceline.model.step import Step
from paceline.types import PAGE_SIZE


class BatchPrefillWithPagedKVCacheWrapper:
    """Computes each request by itself, in float32, and rounds the result to the dtype of the queries."""

    gain = 1.0
    """Factor of all results. Another than 1 tells the library's tokens from the others."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert backend in ("fa2", "fa3"), "its own choice depends on the batch"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert each.dtype == torch.int32
        assert causal
        assert disable_split_kv, "splits depend on the batch"
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        self.lengths = qo_indptr.diff().tolist()
        self.tables = paged_kv_indices.long().split_with_sizes(paged_kv_indptr.diff().tolist())
        self.last = paged_kv_last_page_len.tolist()
        self.sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self.scale, self.dtypes = sm_scale, (q_data_type, kv_data_type or q_data_type)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert (q.shape[1], keys.shape[2], keys.shape[3], keys.shape[1]) == self.sizes
        assert (q.dtype, keys.dtype) == self.dtypes
        rows = [
            self.request(number, query, *(pool[table].flatten(0, 1) for pool in (keys, values)))
            for number, (query, table) in enumerate(zip(q.split(self.lengths), self.tables, strict=True))
        ]
        return (torch.cat(rows) * self.gain).to(q.dtype)

    def request(self, number: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The rows [tokens, heads, dim] of one request, over the keys of all of its pages."""
        num_heads, num_kv_heads, _, page_size = self.sizes
        num_keys = len(keys) - page_size + self.last[number]
        heads = [
            each[:num_keys].float().transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, 0)
            for each in (keys, values)
        ]
        seen = torch.ones(len(query), num_keys, dtype=torch.bool).tril(num_keys - len(query))
        result = F.scaled_dot_product_attention(query.float().transpose(0, 1), *heads, attn_mask=seen, scale=self.scale)
        return result.transpose(0, 1)


def loaded(
    model: PreTrainedModel,
    make: type[BatchPrefillWithPagedKVCacheWrapper],
    block_len: int,
    patch: pytest.MonkeyPatch,
) -> LoadedModel:
    """A model as on a GPU, with the reference of the kernel for attention in place, and a library for its prompts.

    Blocks have ``block_len`` tokens, and requests a page of them.
    """
    module = ModuleType("paceline.model.attention.triton")
    module.__dict__.update(attend_in_place=in_place.attend_in_place, write_in_place=in_place.write_in_place)
    patch.setitem(sys.modules, module.__name__, module)
    patch.setattr(backend, "BLOCK_LEN", block_len)
    patch.setattr(flashinfer, "REQUEST_LEN", PAGE_SIZE)

    def on_device(
        cache: Any, dtype: Any, window: Any, kernel: Any, graphs: Any, most: int, least: Any, library: Any
    ) -> Backend:
        if kernel != "triton":
            return HostBackend(cache, dtype, window)
        return DeviceBackend(cache, dtype, window, kernel=kernel, recorder=None, max_shapes=most, library=library)

    patch.setattr(loading, "make_backend", on_device)
    made = prepare(model, compile=False)
    return replace(made, kernel="triton", step=Step(model, "triton"), library=Library(made.device, make))
