"""openelm convert, option by option: several folders from one read, measuring, uploads, Hub sources, old flags."""

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from artefacts import TINY, TOKENIZER, tiny_config, tiny_weights, write_hub
from fake_hub import TOKEN, use_hub
from fake_hub_uploads import UploadHub
from measures import kl
from safetensors.numpy import save

from openelm_mlx.checkpoint import load_model
from openelm_mlx.cli import main
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert import convert, convert_all, needs
from openelm_mlx.convert.measure import fixed_prompt
from openelm_mlx.errors import ConfigError, HubError, OutputError, TokenizerError
from openelm_mlx.hub import cached_folder
from openelm_mlx.safetensors_file import read_folder

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "apple/OpenELM-tiny-Instruct"


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub with a repository like Apple's: weights and configuration, no tokenizer."""
    files = {name: (TINY / name).read_bytes() for name in ("config.json", "model.safetensors")}
    with UploadHub({REPO: files}) as fake:
        use_hub(monkeypatch, fake.url, tmp_path / "home", token=TOKEN)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        monkeypatch.chdir(tmp_path)
        yield fake


class TestSeveral:
    def test_each_is_what_one_conversion_makes(self, tmp_path):  # fault C17
        made = convert_all("tiny", tmp_path / "all", q_bits=[4, 8], dtype="float16")
        assert [summary.path.name for summary in made] == ["all-4bit", "all-8bit"]
        for bits, summary in zip((4, 8), made, strict=True):
            alone = convert("tiny", tmp_path / f"{bits}", quantize=True, q_bits=bits, dtype="float16")
            assert bytes_of(summary.path) == bytes_of(alone.path)

    def test_the_source_is_read_once(self, tmp_path, monkeypatch):
        from openelm_mlx.convert import streaming

        read, seen = streaming._read, []

        def counted(name, *rows):
            seen.append((name, *rows[1:]))
            return read(name, *rows)

        monkeypatch.setattr(streaming, "_read", counted)
        convert_all("tiny", tmp_path / "all", q_bits=[2, 4, 8])
        assert len(set(seen)) == len(seen) > 10

    def test_all_or_none(self, tmp_path):
        weights = tiny_weights()
        name = "transformer.layers.0.ffn.proj_2.weight"
        source = write_hub(tmp_path / "in", weights | {name: weights[name] * 1e4}, tiny_config())
        with pytest.raises(Exception, match="layer 0"):
            convert_all(source, tmp_path / "out" / "all", q_bits=[4, 8], dtype="float16")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("bits", [[4, 4], []])
    def test_the_same_twice_is_refused(self, tmp_path, bits):
        with pytest.raises(ConfigError, match="expected different numbers of bits"):
            convert_all("tiny", tmp_path / "all", q_bits=bits)

    def test_from_the_command_line(self, tmp_path, capsys):
        out = tmp_path / "my model"
        assert main(["convert", "tiny", "-o", str(out), "-q", "--q-bits", "4", "--q-bits", "8"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.partition(":")[0] for line in lines] == [f"{out}-4bit", f"{out}-8bit"]


class TestMeasure:
    @pytest.mark.parametrize(
        "options", [{"quantize": True, "dtype": "float32"}, {"dtype": "float16"}, {"dtype": "float32"}]
    )
    def test_is_the_divergence_of_the_loaded_models(self, tmp_path, options):
        source = write_hub(tmp_path / "in", tiny_weights(), tiny_config())
        summary = convert(source, tmp_path / "out", measure=True, **options)
        ids = mx.array(fixed_prompt(TOKENIZER, OpenELMConfig.from_file(TINY / "config.json")))[None]
        dtype = options.get("dtype", "bfloat16")
        models = [load_model(source, dtype="float32"), load_model(summary.path, dtype=dtype, keep_quantized=True)]
        expected, found = (np.array(model(ids)[0].astype(mx.float32)) for model in models)
        assert summary.measured.tokens == ids.size == 64
        assert summary.measured.kl == pytest.approx(kl(expected, found), rel=0.05, abs=1e-6)
        assert (summary.measured.kl > 0.005) == ("quantize" in options)

    def test_is_printed(self, tmp_path, capsys):
        assert main(["convert", "tiny", "-o", str(tmp_path / "out"), "-q", "--measure"]) == 0
        assert ", KL to the source 0.0" in capsys.readouterr().out


class TestUpload:
    def test_the_folder_with_its_card(self, hub, tmp_path, capsys):
        arguments = ["convert", "tiny", "-o", "out", "-q", "--measure", "--upload-repo", "me/tiny", "--upload-private"]
        assert main(arguments) == 0
        sent = hub.files("me/tiny")[1]
        assert {name: data for name, data in sent.items() if name != ".gitattributes"} == bytes_of(Path("out"))
        card = sent["README.md"].decode()
        assert "# me/tiny" in card
        assert "| measured | KL to the source 0.0" in card
        assert hub.made[0].get("visibility", hub.made[0].get("private")) in ("private", True)
        assert capsys.readouterr().out.rstrip().endswith(f", at {hub.url}/me/tiny")

    def test_several_have_a_repository_each(self, hub):
        convert_all("tiny", "out", q_bits=[4, 8], upload_repo="me/tiny")
        for bits in (4, 8):
            assert hub.files(f"me/tiny-{bits}bit")[1]["config.json"] == Path(f"out-{bits}bit/config.json").read_bytes()

    def test_a_dry_run_sends_nothing(self, hub, capsys):
        assert main(["convert", "tiny", "-o", "out", "--upload-repo", "me/tiny", "--upload-dry-run"]) == 0
        assert hub.requests == []
        assert "dry run: would upload 7 files" in capsys.readouterr().out

    def test_what_cannot_succeed_is_refused_before_the_work(self, hub):
        hub.failures["whoami"] = "401"
        with pytest.raises(HubError, match="leave --upload-repo out"):
            convert("tiny", "out", upload_repo="me/tiny")
        assert not Path("out").exists()

    def test_a_failed_one_keeps_the_folder_and_says_how_to_go_on(self, hub, capsys):
        hub.failures["me/tiny"] = "commit 500"
        assert main(["convert", "tiny", "-o", "out", "--upload-repo", "me/tiny"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "the model itself is done, in out; upload it later with `hf upload me/tiny out .`" in line
        assert load_model(Path("out")) is not None
        assert "# me/tiny" in Path("out/README.md").read_text()

    @pytest.mark.parametrize("flag", ["--upload-private", "--upload-dry-run"])
    def test_flags_without_a_repository(self, flag, capsys):
        assert main(["convert", "tiny", flag]) == 2
        assert f"{flag} needs --upload-repo" in capsys.readouterr().err


class TestFromTheHub:
    def test_to_a_folder_whose_card_names_the_origin(self, hub, tmp_path):
        convert(REPO, "out", tokenizer=str(TOKENIZER), upload_repo="me/tiny")
        assert set(read_folder(Path("out"))) == set(read_folder(TINY))
        assert f"base_model: {REPO}" in Path("out/README.md").read_text()
        assert "chat_template" in json.loads(Path("out/tokenizer_config.json").read_text())

    def refused_before_the_weights(self, hub, error, match, **options):
        with pytest.raises(error, match=match):
            convert(REPO, "out", **options)
        assert hub.downloads() == ["config.json"]
        assert not Path("out").exists()
        assert cached_folder(REPO) is None  # nothing says that it is whole

    def test_a_peft_adapter(self, hub, capsys):
        weights = {
            "base_model.model.transformer.layers.0.attn.out_proj.lora_A.weight": np.ones((2, 8), np.float32),
            "base_model.model.transformer.layers.0.attn.out_proj.lora_B.weight": np.ones((4, 2), np.float32),
        }
        raw = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": REPO}
        hub.repos["me/peft"] = {
            "adapter_config.json": json.dumps(raw).encode(),
            "adapter_model.safetensors": save(weights),
            "README.md": b"x",
        }
        assert main(["convert", "me/peft", "-o", "refused", "-q"]) == 2
        assert "is for models" in capsys.readouterr().err
        assert not Path("refused").exists()
        assert main(["convert", "me/peft", "--revision", "main", "-o", "adapter", "--json"]) == 0
        shown = capsys.readouterr().out
        assert "LoRA, rank 2, scale 2" in shown
        assert json.loads(shown.splitlines()[-1])["path"] == "adapter"
        assert sorted(path.name for path in Path("adapter").iterdir()) == [
            "adapter_config.json",
            "adapters.safetensors",
        ]
        assert main(["info", "me/peft", "--json", "--offline"]) == 0
        assert json.loads(capsys.readouterr().out)["format"] == "peft"
        assert main(["generate", "--model", "me/peft"]) == 2
        assert "adapter" in capsys.readouterr().err

    def test_no_tokenizer(self, hub):  # fault B1
        self.refused_before_the_weights(hub, TokenizerError, "pass --tokenizer")

    def test_another_models_configuration(self, hub):
        hub.repos[REPO] = hub.repos[REPO] | {"config.json": b'{"model_type": "llama"}'}
        self.refused_before_the_weights(hub, ConfigError, "'llama' is not supported")

    def test_bits_that_fit_nothing(self, hub):
        raw = tiny_config() | {"model_dim": 96}
        hub.repos[REPO] = hub.repos[REPO] | {"config.json": json.dumps(raw).encode()}
        with pytest.raises(ConfigError):
            convert(REPO, "out", quantize=True, q_group_size=128, tokenizer=str(TOKENIZER))

    def test_the_target_lacks_room_for_both(self, hub, monkeypatch):  # fault C3
        free = shutil._ntuple_diskusage(0, 0, 20_000_000)
        monkeypatch.setattr("openelm_mlx.atomic.shutil.disk_usage", lambda path: free)
        match = r"out needs 0\.03 GB, .* has 0\.02 GB free"
        self.refused_before_the_weights(hub, OutputError, match, tokenizer=str(TOKENIZER))

    def test_the_cache_lacks_room(self, hub, monkeypatch):
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000_000))
        with pytest.raises(HubError, match=r"needs 9\.2 MB in the Hub cache, .* has 1\.0 MB free: make room"):
            convert(REPO, "out", tokenizer=str(TOKENIZER))
        assert hub.downloads() == []


FAILURES = {
    "401": "401",
    "gated": "403.*licence",
    "403": "403",
    "404": "404",
    "429": "429.*wait 300 s",
    "503": "503",
    "web page": "what answers is not the Hub",
    "dead": "was cut: run again",
    "corrupt": "arrived damaged",
}


class TestHubFailures:
    def convert(self, *more: str) -> int:
        return main(["convert", REPO, "-o", "out", "--tokenizer", str(TOKENIZER), *more])

    @pytest.mark.parametrize("failure", FAILURES)
    def test_each_failure_is_one_line_and_leaves_nothing(self, hub, capsys, failure):  # faults B2, C4
        hub.failures[REPO] = failure
        assert self.convert() == 2
        *said, line = capsys.readouterr().err.splitlines()
        assert re.search(f"^openelm: error: .*{FAILURES[failure]}", line)
        assert not any("error" in other for other in said)
        assert not Path("out").exists()
        del hub.failures[REPO]
        assert self.convert() == 0

    def test_a_cut_transfer_goes_on_where_it_stopped(self, hub, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)  # what is kept of a cut transfer
        hub.failures[REPO] = "cut"
        if self.convert() == 2:  # the first releases of huggingface_hub go on at the next call only
            assert self.convert() == 0
        assert any(request.range for request in hub.requests)

    def test_cached_and_offline(self, hub, capsys):
        assert self.convert("--offline") == 2
        assert "offline was asked for" in capsys.readouterr().err
        assert self.convert() == 0
        asked = len(hub.requests)
        assert self.convert("--offline", "--force") == 0
        assert self.convert("--force", "--dtype", "float16") == 0
        assert len(hub.requests) == asked

    def test_another_revision(self, hub, capsys):
        hub.repos[f"{REPO}@v2"] = hub.repos[REPO]
        assert self.convert("--revision", "v2") == 0
        assert self.convert("--force", "--revision", "v3") == 2
        assert "has no revision 'v3'" in capsys.readouterr().err


class TestSmallMistakes:
    @pytest.mark.parametrize("text", ["", "{", "[1]", "{}x"])
    def test_a_broken_config_is_spoken_of_as_json(self, tmp_path, capsys, text):
        source = write_hub(tmp_path / "in", tiny_weights(), tiny_config())
        (source / "config.json").write_text(text)
        assert main(["convert", str(source), "-o", str(tmp_path / "out")]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert ("is empty" if text == "" else "JSON") in line
        assert "general_gpt" not in line

    def test_what_is_no_checkpoint(self, tmp_path, capsys):
        (tmp_path / "notes.txt").write_text("hello\n")
        assert main(["convert", str(tmp_path / "notes.txt")]) == 2
        assert "is no checkpoint: it starts with b'hello" in capsys.readouterr().err

    def test_a_link_to_nowhere_is_no_hub_id(self, hub, capsys):
        Path("my").mkdir()
        Path("my/model").symlink_to("moved")
        assert main(["convert", "my/model"]) == 2
        assert "my/model is a link to moved, which is not there" in capsys.readouterr().err
        assert hub.requests == []


class TestMemoryNeeded:
    @pytest.mark.parametrize(("source", "folders"), [("tiny", 1), (REPO, 2)])
    def test_both_numbers_before_any_work(self, hub, monkeypatch, source, folders):
        monkeypatch.setattr(needs, "available_memory_bytes", lambda: 100_000_000)
        options = {"q_bits": [4, 8]} if folders == 2 else {}
        call = convert_all if folders == 2 else convert
        with pytest.raises(OutputError, match=r"needs up to 0\.[23]\d GB of memory, 0\.10 GB are available"):
            call(source, "out", tokenizer=str(TOKENIZER), **options)
        assert not Path("out").exists()
        assert set(hub.downloads()) <= {"config.json"}

    def test_is_no_matter_of_the_models_depth(self):
        sizes = [needs.memory_bytes(OpenELMConfig.from_name(size)) for size in ("270M", "3B")]
        assert max(sizes) == min(sizes) < 400e6
        page = (Path(__file__).parent.parent / "docs" / "memory.md").read_text()
        both = needs.memory_bytes(OpenELMConfig.from_name("3B"), 2)
        assert f"asks for {sizes[0] / 1e9:.2f} GB ({both / 1e9:.2f} GB for two folders" in page


class TestMigration:
    @pytest.mark.parametrize(
        ("arguments", "equivalent"),
        [
            (
                "--input-checkpoint a.pt --config-yaml a.yaml --tokenizer-path t.model --output-dir out --quantize"
                " --quantization-bits 8 --quantization-group-size 32",
                "openelm convert a.pt --config a.yaml --tokenizer t.model -o out --q-bits 8 --q-group-size 32"
                " -q --embedding-bits 16 --dtype float16",
            ),
            ("--input-checkpoint=a.pt --dtype bfloat16", "openelm convert a.pt --dtype bfloat16"),
            ("a.pt --quantization-bits 4", "openelm convert a.pt --dtype float16"),
            ("--output-dir out", "openelm convert SOURCE -o out --dtype float16"),
        ],
    )
    def test_apples_options_give_the_same_command(self, arguments, equivalent, capsys):
        assert main(["convert", *arguments.split()]) == 2
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1
        assert printed.err.rstrip().endswith(
            f"these are the options of Apple's port; the same is done by: {equivalent}"
        )

    def test_the_command_given_is_understood(self, capsys, tmp_path):
        arguments = ["--input-checkpoint", "tiny", "--output-dir", str(tmp_path / "a b"), "--quantize"]
        main(["convert", *arguments])
        words = shlex.split(capsys.readouterr().err.partition("done by: ")[2])
        assert main(words[1:]) == 0
        assert (tmp_path / "a b" / "model.safetensors").is_file()

    def test_help_does_not_show_them(self, capsys):
        with pytest.raises(SystemExit):
            main(["convert", "--help"])
        assert "--input-checkpoint" not in capsys.readouterr().out


class TestJson:
    def test_one_object_is_the_last_line(self, capsys, tmp_path):
        arguments = ["--q-bits", "4", "--q-bits", "8", "-q", "--measure", "--json"]
        assert main(["convert", "tiny", "-o", str(tmp_path / "made"), *arguments]) == 0
        facts = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [Path(one["path"]).name for one in facts["models"]] == ["made-4bit", "made-8bit"]
        assert facts["models"][0]["kl_to_source"] > facts["models"][1]["kl_to_source"] > 0
        assert facts["models"][0]["quantization"]["bits"] == 4
        sizes = [(Path(one["path"]) / "model.safetensors").stat().st_size for one in facts["models"]]
        assert all(0 < size - one["bytes"] < 2**16 for size, one in zip(sizes, facts["models"], strict=True))


class TestTargetIsSource:  # fault C1
    @pytest.mark.parametrize(
        "command",
        [
            "convert peft -o peft --force",
            "convert peft/../peft -o . --force",
            "export ours --to peft -o ours --force",
            "export model --to hf -o model --force",
            "convert tiny model --average -o model --force",
            "fuse --model tiny --adapter-path ours --save-path ours --force",
        ],
    )
    def test_nothing_is_written_over_what_is_read(self, command, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(TINY, "model")
        for name, text in (("ours", "{}"), ("peft", '{"peft_type": "LORA"}')):
            Path(name).mkdir()
            Path(name, "adapter_config.json").write_text(text)
        before = sorted(tmp_path.rglob("*"))
        assert main(command.split()) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert "is (or holds)" in line or "where you are working" in line
        assert sorted(tmp_path.rglob("*")) == before


class TestWrongWords:
    """What is typed wrongly is told in one line, whatever the command, and nothing is made."""

    @pytest.mark.parametrize(
        ("command", "words"),
        [
            ("convert tiny -o ~nobody-here/x", "no user of that name"),
            ("convert tiny -o x -q --method gptq --calibration ~nobody-here/x", "no user of that name"),
            ("export tiny --to hf -o ~nobody-here/x", "no user of that name"),
            ("export tiny --to gguf -o ~nobody-here/x", "no user of that name"),
            ("export ~nobody-here/x --to peft -o x", "no user of that name"),
            ("fuse --model tiny --save-path ~nobody-here/x", "no user of that name"),
            ("info log.txt --plot ~nobody-here/x.png", "no user of that name"),
            ("convert tiny -o x -q --method gptq --seed -1", "--seed must be 0 or more, got -1"),
            ("convert /dev/null -o x", "neither a file nor a folder"),
            ("convert ours -o x", "is an adapter, not a model"),
            ("info ours", "ours/adapter_config.json: num_layers must be a whole number"),
            ("export tiny --to peft -o x", "no adapter folder tiny; expected one with"),
            ("fuse --model tiny --adapter-path empty", "no adapter folder empty; expected one with"),
            ("convert peft -o x --upload-dry-run", "--upload-dry-run is for models"),
            ("convert peft tiny -o x", "a further SOURCE is for models"),
        ],
    )
    def test_one_line(self, command, words, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("log.txt").write_text("2024-03-01 00:46:44 - LOGS    - x\n")
        Path("empty").mkdir()
        for name, text in (("ours", "{}"), ("peft", '{"peft_type": "LORA"}')):
            Path(name).mkdir()
            Path(name, "adapter_config.json").write_text(text)
        before = sorted(tmp_path.rglob("*"))
        assert main(command.split()) == 2
        line = capsys.readouterr().err
        assert (line.count("\n"), words in line) == (1, True), line
        assert sorted(tmp_path.rglob("*")) == before
