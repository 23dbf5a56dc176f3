"""The laws of a configuration: published widths, every way in agrees, config and tensors judge each other."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import layer_widths, parameter_shapes, small_config

import openelm_mlx
from openelm_mlx.config import PUBLISHED_SIZES, OpenELMConfig, published_size, read_json_object
from openelm_mlx.errors import ConfigError
from openelm_mlx.scaling import interpolate, make_divisible

SIZES = list(PUBLISHED_SIZES)
PARAMETERS = {"270M": 271_527_168, "450M": 457_179_136, "1_1B": 1_079_891_456, "3B": 3_036_647_424}
PADDED_PARAMETERS = {"270M": 271_691_008, "450M": 457_375_744, "1_1B": 1_080_153_600, "3B": 3_037_040_640}
QUERY_HEADS = {  # heads x layers
    "270M": [12] * 5 + [16] * 7 + [20] * 4,
    "450M": [12] * 3 + [16] * 7 + [20] * 6 + [24] * 4,
    "1_1B": [16] * 3 + [20] * 7 + [24] * 8 + [28] * 6 + [32] * 4,
    "3B": [12] * 4 + [16] * 14 + [20] * 12 + [24] * 6,
}
FFN_DIMS_IN_256 = {
    "270M": [3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20],
    "450M": [3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 23, 24],
    "1_1B": [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 18, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32],
    "3B": [
        *[6, 7, 8, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 22, 23, 24, 25, 26],
        *[28, 29, 30, 31, 32, 34, 35, 36, 37, 38, 40, 41, 42, 43, 44, 46, 47, 48],
    ],
}


def published_dict(size: str, **changes) -> dict:
    """A published size as Apple's YAML gives it: bounds, no lists."""
    common = {"qkv_multipliers": [0.5, 1.0], "ffn_multipliers": [0.5, 4.0], "num_gqa_groups": 4}
    return {**PUBLISHED_SIZES[size], **common, "ffn_dim_divisor": 256, "vocab_size": 32000, **changes}


class TestPublishedSizes:
    @pytest.mark.parametrize("size", SIZES)
    def test_widths_and_parameters(self, size):
        config = OpenELMConfig.from_name(size)
        assert list(config.num_query_heads) == QUERY_HEADS[size]
        assert [4 * kv for kv in config.num_kv_heads] == QUERY_HEADS[size]
        assert [dim // 256 for dim in config.ffn_dims] == FFN_DIMS_IN_256[size]
        assert all(dim % 256 == 0 for dim in config.ffn_dims)
        assert config.num_parameters() == PARAMETERS[size]
        assert OpenELMConfig.from_name(size, vocab_size=32128).num_parameters() == PADDED_PARAMETERS[size]

    def test_multipliers_are_those_of_apples_config_json(self):
        expected = (0.5, 0.73, 0.97, 1.2, 1.43, 1.67, 1.9, 2.13, 2.37, 2.6, 2.83, 3.07, 3.3, 3.53, 3.77, 4.0)
        assert OpenELMConfig.from_name("270M").ffn_multipliers == expected
        assert OpenELMConfig.from_name("1_1B").ffn_multipliers[1:3] == (0.63, 0.76)

    @pytest.mark.parametrize("size", SIZES)
    def test_the_reference_derives_the_same_widths(self, size):
        config = OpenELMConfig.from_name(size)
        ours = list(zip(config.num_query_heads, config.num_kv_heads, config.ffn_dims, strict=True))
        assert ours == layer_widths(published_dict(size))

    def test_rounding_the_multipliers_first_decides_these_layers(self):
        # fault A5: 450M alone would hide the mistake
        changed = {size: layers_that_need_rounding(size) for size in SIZES}
        assert changed == {
            "270M": {"heads": [5], "ffn": []},
            "450M": {"heads": [], "ffn": []},
            "1_1B": {"heads": [3, 10, 17], "ffn": [13, 14]},
            "3B": {"heads": [17], "ffn": []},
        }

    @pytest.mark.parametrize(
        ("name", "size"),
        [
            ("270M", "270M"),
            ("1.1B", "1_1B"),
            ("1_1b", "1_1B"),
            ("OpenELM-1_1B", "1_1B"),
            ("apple/OpenELM-3B-Instruct", "3B"),
            ("apple/OpenELM", None),
            ("7B", None),
            ("", None),
        ],
    )
    def test_names(self, name, size):
        assert published_size(name) == size

    def test_unknown_name_lists_the_known_ones(self):
        with pytest.raises(ConfigError, match="'7B' is not a published OpenELM.*270M, 450M, 1_1B, 3B"):
            OpenELMConfig.from_name("7B")


def layers_that_need_rounding(size: str) -> dict[str, list[int]]:
    config = OpenELMConfig.from_name(size)
    layers, dim, head = config.num_transformer_layers, config.model_dim, config.head_dim
    heads = [make_divisible(m * dim, 4 * head) // head for m in np.linspace(0.5, 1.0, layers)]
    ffn = [make_divisible(m * dim, 256) for m in np.linspace(0.5, 4.0, layers)]
    return {
        "heads": [i for i in range(layers) if heads[i] != config.num_query_heads[i]],
        "ffn": [i for i in range(layers) if ffn[i] != config.ffn_dims[i]],
    }


class TestScaling:
    @pytest.mark.parametrize(("value", "divisible"), [(285, 512), (284, 256), (383, 512), (100, 256), (640, 768)])
    def test_make_divisible_never_loses_more_than_a_tenth(self, value, divisible):
        # fault A6
        assert make_divisible(value, 256) == divisible

    @given(st.floats(0.01, 1e6), st.integers(1, 1024))
    def test_make_divisible_bounds(self, value, divisor):
        result = make_divisible(value, divisor)
        assert result % divisor == 0
        assert result >= max(divisor, 0.9 * value)
        assert result <= value + 1.5 * divisor

    @given(st.floats(0.1, 8), st.floats(0.1, 8), st.integers(2, 64))
    def test_interpolate_is_numpys_linspace_rounded(self, low, high, layers):
        assert interpolate((low, high), layers) == [round(float(v), 2) for v in np.linspace(low, high, layers)]


def small_configs() -> st.SearchStrategy[dict]:
    """Random configurations as config.json gives them: any groups, bounds or one number or lists, every option."""
    number = st.integers(10, 400).map(lambda n: n / 100)
    multipliers = number | st.lists(number, min_size=2, max_size=2)
    changes = st.fixed_dictionaries(
        {
            "num_transformer_layers": st.integers(1, 6),
            "model_dim": st.integers(4, 40).map(lambda n: 8 * n),
            "head_dim": st.sampled_from([2, 8, 32, 64]),
            "num_gqa_groups": st.integers(1, 4),
            "qkv_multipliers": multipliers,
            "ffn_multipliers": multipliers,
            "ffn_dim_divisor": st.sampled_from([1, 8, 12, 64, 256]),
            "vocab_size": st.integers(3, 500),
            "max_context_length": st.integers(1, 4096),
            "ffn_with_glu": st.booleans(),
            "normalize_qk_projections": st.booleans(),
            "share_input_output_layers": st.booleans(),
            "rope_freq_constant": st.sampled_from([10000, 500000.5]),
        }
    )
    without_lists = changes.map(lambda c: {"bos_token_id": 1, "eos_token_id": 2, **c})
    return st.one_of(without_lists, without_lists.map(lambda c: small_config(**c)))


class TestWaysIn:
    @given(small_configs())
    def test_widths_and_shapes_are_the_references(self, raw):
        # fault A4: each layer's own width
        config = OpenELMConfig.from_dict(raw)
        ours = list(zip(config.num_query_heads, config.num_kv_heads, config.ffn_dims, strict=True))
        assert ours == layer_widths(raw)
        assert config.parameter_shapes() == parameter_shapes(raw)

    @given(small_configs())
    def test_what_is_written_reads_back_the_same(self, raw):
        config = OpenELMConfig.from_dict(raw)
        assert OpenELMConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

    @given(small_configs().filter(lambda raw: raw["normalize_qk_projections"]))
    def test_shapes_give_the_widths_back(self, raw):
        config = OpenELMConfig.from_dict(raw)
        shapes = config.parameter_shapes()
        read = OpenELMConfig.from_shapes(shapes)
        assert read.parameter_shapes() == shapes
        assert read.num_query_heads == config.num_query_heads
        assert OpenELMConfig.from_dict(read.to_dict()) == read

    @pytest.mark.parametrize("size", SIZES)
    def test_shapes_of_a_published_size_give_its_configuration_back(self, size):
        config = OpenELMConfig.from_name(size)
        read = OpenELMConfig.from_shapes(config.parameter_shapes())
        assert read == config
        assert read.to_dict() == config.to_dict()
        assert read.to_dict()["qkv_multipliers"] == [0.5, 1.0]

    def test_bundled_config_json_survives(self):
        path = Path(openelm_mlx.__file__).parent / "data" / "tiny" / "config.json"
        raw = read_json_object(path)
        config = OpenELMConfig.from_file(path)
        assert config.num_parameters() == 4_607_616
        written = config.to_dict()
        assert {key: raw[key] for key in written if key in raw} == {key: written[key] for key in written if key in raw}
        assert OpenELMConfig.from_shapes(config.parameter_shapes()).ffn_dims == config.ffn_dims

    def test_one_number_means_every_layer(self):
        config = OpenELMConfig.from_dict(published_dict("270M", qkv_multipliers=1, ffn_multipliers=3.0))
        assert set(config.num_query_heads) == {20}
        assert set(config.ffn_dims) == {3840}
        assert config.to_dict()["qkv_multipliers"] == 1.0

    def test_explicit_lists_rule(self):
        raw = small_config(num_query_heads=[2, 4, 4, 6], num_kv_heads=[1, 2, 2, 3])
        config = OpenELMConfig.from_dict(raw)
        assert (config.num_query_heads, config.num_kv_heads) == ((2, 4, 4, 6), (1, 2, 2, 3))

    def test_widths_that_no_bounds_give_still_read_back(self):
        raw = small_config(
            ffn_multipliers=[2.0, 0.5, 3.0, 0.5], num_query_heads=[6, 2, 4, 2], num_kv_heads=[3, 1, 2, 1]
        )
        config = OpenELMConfig.from_dict(raw)
        assert OpenELMConfig.from_shapes(config.parameter_shapes()).ffn_dims == (256, 64, 384, 64)

    def test_a_config_cannot_be_changed(self):
        config = OpenELMConfig.from_name("270M")
        with pytest.raises(FrozenInstanceError):
            config.model_dim = 1


class TestShapes:
    def shapes(self, **changes) -> dict[str, tuple[int, ...]]:
        return OpenELMConfig.from_dict(small_config(**changes)).parameter_shapes()

    def test_a_whole_checkpoint_fits(self):
        config = OpenELMConfig.from_dict(small_config())
        assert config.check_shapes(self.shapes()) is None

    def test_missing_renamed_added_and_misshapen_are_listed_together(self):
        # fault A10: nothing stays at its initial value, nothing is silently left over
        shapes = self.shapes()
        del shapes["transformer.norm.weight"]
        shapes["transformer.layers.1.ffn.proj_9.weight"] = shapes.pop("transformer.layers.1.ffn.proj_2.weight")
        shapes["extra.bias"] = (4,)
        shapes["transformer.layers.2.attn.q_norm.weight"] = (16,)
        with pytest.raises(ConfigError) as caught:
            OpenELMConfig.from_dict(small_config()).check_shapes(shapes, where="model")
        assert str(caught.value) == (
            "model does not fit its config: missing transformer.layers.1.ffn.proj_2.weight; "
            "missing transformer.norm.weight; unexpected transformer.layers.1.ffn.proj_9.weight; "
            "unexpected extra.bias; transformer.layers.2.attn.q_norm.weight has shape (16,), the config gives (32,)"
        )

    def test_a_long_list_is_counted(self):
        with pytest.raises(ConfigError, match="; and 26 more$"):
            OpenELMConfig.from_dict(small_config()).check_shapes({})

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_head_exists_exactly_where_it_is_untied_and_is_vocabulary_by_model(self, tied):
        # fault A11
        shapes = self.shapes(share_input_output_layers=tied)
        assert shapes.get("lm_head.weight") == (None if tied else (256, 128))
        assert OpenELMConfig.from_shapes(shapes).share_input_output_layers is tied
        other = OpenELMConfig.from_dict(small_config(share_input_output_layers=not tied))
        with pytest.raises(ConfigError, match="missing lm_head" if tied else "unexpected lm_head"):
            other.check_shapes(shapes)

    @pytest.mark.parametrize(
        ("name", "shape", "complaint"),
        [
            ("transformer.token_embeddings.weight", None, "token_embeddings.weight is missing"),
            ("transformer.token_embeddings.weight", (256,), r"token_embeddings.weight has shape \(256,\)"),
            ("transformer.layers.0.attn.qkv_proj.weight", None, "layers.0.attn.qkv_proj.weight is missing"),
            ("transformer.layers.0.attn.q_norm.weight", None, "head_dim cannot be read.*--config"),
            ("transformer.layers.1.attn.qkv_proj.weight", (250, 128), "layer 1: qkv_proj 250 and out_proj 128"),
            ("transformer.layers.1.attn.qkv_proj.weight", (64, 128), "layer 1: qkv_proj 64"),
            ("transformer.layers.2.ffn.proj_1.weight", (300, 128), "layer 2: proj_1 has 300 rows for proj_2's 192"),
            ("transformer.layers.2.ffn.proj_1.weight", (192, 128), "some layers have a gated .* and some do not"),
            ("transformer.layers.3.ffn.proj_2.weight", None, "layers.3.ffn.proj_2.weight is missing"),
            ("transformer.layers.3.ffn.proj_2.weight", (128, 0), r"proj_2.weight has shape \(128, 0\)"),
        ],
    )
    def test_tensors_that_make_no_openelm_are_named(self, name, shape, complaint):
        shapes = self.shapes()
        del shapes[name]
        if shape is not None:
            shapes[name] = shape
        with pytest.raises(ConfigError, match=complaint):
            OpenELMConfig.from_shapes(shapes)

    def test_a_gap_between_layers_does_not_pass(self):
        shapes = {name: shape for name, shape in self.shapes().items() if "layers.2." not in name}
        with pytest.raises(ConfigError, match=r"unexpected transformer\.layers\.3"):
            OpenELMConfig.from_shapes(shapes).check_shapes(shapes)

    def test_no_tensors(self):
        with pytest.raises(ConfigError, match="qkv_proj.weight is missing"):
            OpenELMConfig.from_shapes({})

    def test_a_hostile_number_of_layers_ends_quickly(self):
        layer = {name.split(".0.", 1)[1]: s for name, s in self.shapes().items() if "layers.0." in name}
        shapes = {"transformer.token_embeddings.weight": (256, 128)}
        shapes |= {f"transformer.layers.{i}.{name}": s for i in range(20_000) for name, s in layer.items()}
        with pytest.raises(ConfigError, match="num_transformer_layers must be at most 1024"):
            OpenELMConfig.from_shapes(shapes)

    def test_changes_say_what_shapes_cannot(self):
        config = OpenELMConfig.from_shapes(self.shapes(), max_context_length=64)
        assert config == replace(OpenELMConfig.from_shapes(self.shapes()), max_context_length=64)
