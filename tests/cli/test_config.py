"""`sppo config`: a settings file that reads back as the defaults, and names that are none."""

from pathlib import Path

from typer.testing import CliRunner

from sppo_hf.cli import app
from sppo_hf.config import SPPOConfig, field_help


def test_the_output_is_a_settings_file_of_defaults(tmp_path: Path) -> None:
    out = CliRunner().invoke(app, ["config"]).stdout
    (tmp_path / "sppo.yaml").write_text(out)
    assert SPPOConfig.from_yaml(tmp_path / "sppo.yaml") == SPPOConfig()
    assert field_help("return_logits") in " ".join(out.replace("# ", "").split())


def test_one_setting_and_one_that_is_none() -> None:
    out = CliRunner().invoke(app, ["config", "offload_dir"]).stdout
    assert "offload_dir: null" in out
    assert "None" not in out, "which YAML reads as a text"
    assert "null uses no disk" in " ".join(out.replace("# ", "").split())
    result = CliRunner().invoke(app, ["config", "ofload"])
    assert result.exit_code == 2
    assert "'offload'" in result.stderr
