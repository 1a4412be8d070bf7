"""Growth changes the cost of a model and nothing else."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from paceline_bench.grow import grow, grow_checkpoint, parse_size

# Sums of a longer row are taken in another order: float32 rounding of logits of size about 1.
TOLERANCE = 1e-5


def tiny_model(*, tied: bool = True, bias: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    result: Tensor = model(input_ids=ids).logits
    return result


def largest_difference(model: LlamaForCausalLM, grown: LlamaForCausalLM) -> float:
    ids = torch.randint(96, (3, 20), generator=torch.Generator().manual_seed(5))
    return float((logits(model, ids) - logits(grown, ids)).abs().max())


def greedy(model: LlamaForCausalLM, num_new: int = 24) -> Tensor:
    prompt = torch.tensor([[5, 17, 40, 2]])
    for _ in range(num_new):
        prompt = torch.cat([prompt, logits(model, prompt)[:, -1:].argmax(-1)], dim=1)
    return prompt


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.3, 4.0, 20.0])
def test_same_function_at_the_requested_size(factor: float, bias: bool, tied: bool) -> None:
    model = tiny_model(tied=tied, bias=bias)
    requested = int(model.num_parameters() * factor)
    grown = grow(model, requested)
    assert grown.num_parameters() == pytest.approx(requested, rel=0.05)
    assert largest_difference(model, grown) <= TOLERANCE
    assert torch.equal(greedy(model), greedy(grown))


def test_added_layers_are_spread_and_chosen_by_the_caller() -> None:
    model = tiny_model()
    grown = grow(model, 400_000, num_layers=6)
    assert grown.config.num_hidden_layers == len(grown.model.layers) == 6
    working = [i for i, layer in enumerate(grown.model.layers) if layer.self_attn.o_proj.weight.any()]
    assert working == [0, 3]
    assert largest_difference(model, grown) <= TOLERANCE
    assert grown.config.grown_from_num_parameters == model.num_parameters()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("times", [1, 4, 16])
def test_a_wider_residual_stream_computes_the_same(times: int, bias: bool, tied: bool) -> None:
    model = tiny_model(tied=tied, bias=bias)
    requested = int(model.num_parameters() * 4 * times * times)
    grown = grow(model, requested, hidden_size=32 * times)
    assert grown.num_parameters() == pytest.approx(requested, rel=0.05)
    shape = grown.config.hidden_size, grown.config.num_attention_heads, grown.config.num_key_value_heads
    assert shape == (32 * times, 4 * times, 2 * times)
    assert grown.config.grown_from_num_parameters == model.num_parameters()
    assert largest_difference(model, grown) <= TOLERANCE
    assert torch.equal(greedy(model), greedy(grown))


def test_norms_of_a_wider_stream_are_those_of_bfloat16() -> None:
    """Weights and epsilon are divided by powers of two, so that no bit of a norm is another one."""
    model = tiny_model().bfloat16()
    grown = grow(model, 4_000_000, hidden_size=512)
    hidden = torch.randn(3, 32, dtype=torch.bfloat16) * 1e-3  # epsilon counts
    own, theirs = model.model.norm(hidden), grown.model.norm(torch.cat([hidden, hidden.new_zeros(3, 480)], 1))
    assert torch.equal(theirs[:, :32], own)
    assert not theirs[:, 32:].any()


@pytest.mark.parametrize("name", ["norm", "layers.0.input_layernorm", "layers.1.post_attention_layernorm"])
def test_a_norm_of_another_scale_is_caught(name: str) -> None:
    model = tiny_model()
    grown = grow(model, 400_000, hidden_size=128)
    with torch.no_grad():
        grown.model.get_submodule(name).get_parameter("weight").mul_(2.0)
    assert largest_difference(model, grown) > 100 * TOLERANCE


@pytest.mark.parametrize("hidden_size", [16, 33, 64, 96, 256])
def test_other_hidden_sizes_are_refused(hidden_size: int) -> None:
    with pytest.raises(ValueError, match=rf"hidden size of {hidden_size}: 32 times 1, 4, 16"):
        grow(tiny_model(), 10_000_000, hidden_size=hidden_size)


@pytest.mark.parametrize("projection", ["self_attn.o_proj", "mlp.down_proj"])
def test_an_added_layer_that_writes_is_caught(projection: str) -> None:
    """The mutant: the comparison above must see one nonzero output weight of an added layer."""
    model = tiny_model()
    grown = grow(model, 400_000, num_layers=6)
    with torch.no_grad():
        grown.model.layers[1].get_submodule(projection).get_parameter("weight").fill_(0.05)
    assert largest_difference(model, grown) > 100 * TOLERANCE


def test_an_added_neuron_that_writes_is_caught() -> None:
    model = tiny_model()
    grown = grow(model, 400_000, num_layers=2)
    with torch.no_grad():
        grown.model.layers[0].mlp.down_proj.weight[:, -1] = 2.0
    assert largest_difference(model, grown) > 100 * TOLERANCE


def test_bfloat16_adds_exact_zeros() -> None:
    """An added layer returns its input bit for bit; a wider product may only round its partial sums anew."""
    model = tiny_model()
    model.bfloat16()
    grown = grow(model, 300_000)
    assert grown.dtype == torch.bfloat16
    ids = torch.arange(40).reshape(2, 20)
    own, theirs = logits(model, ids).float(), logits(grown, ids).float()
    assert float((own - theirs).abs().max()) <= 2**-7 * float(own.abs().max())
    added = grow(model, 100_000, num_layers=4).model.layers[1]
    hidden = torch.randn(1, 4, 32, dtype=torch.bfloat16)
    position = model.model.rotary_emb(hidden, torch.arange(4)[None])
    assert torch.equal(added(hidden, position_embeddings=position), hidden)


def test_sizes_below_the_model_are_refused() -> None:
    model = tiny_model()
    own = model.num_parameters()
    with pytest.raises(ValueError, match=rf"{own - 1} parameters.*has {own}"):
        grow(model, own - 1)
    with pytest.raises(ValueError, match=r"1 layers.*has 2"):
        grow(model, 2 * own, num_layers=1)
    with pytest.raises(ValueError, match="50 layers need at least"):
        grow(model, 2 * own, num_layers=50)


def test_a_grown_checkpoint_loads_like_any_other(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = tiny_model()
    model.save_pretrained(tmp_path / "source")
    words = Tokenizer(WordLevel({"<unk>": 0, "pass": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "source")
    size = grow_checkpoint(tmp_path / "source", tmp_path / "grown", 200_000, torch.float32)
    grown = LlamaForCausalLM.from_pretrained(tmp_path / "grown", dtype=torch.float32)
    assert grown.num_parameters() == size == pytest.approx(200_000, rel=0.05)
    assert largest_difference(model, grown) <= TOLERANCE
    assert grown.config.grown_from_num_parameters == model.num_parameters()
    assert grown.generation_config.eos_token_id == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "grown").encode("pass") == [1]


@pytest.mark.parametrize(
    ("text", "number"),
    [("150M", 150_000_000), ("8B", 8 * 10**9), ("1.5B", 15 * 10**8), ("2k", 2000), ("12", 12), (7, 7)],
)
def test_parse_size(text: str | int, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize("text", ["", "8T", "-1", "0", "1e9", "B"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="optional suffix K, M or B"):
        parse_size(text)
