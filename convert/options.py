"""What converting and exporting are told alike: where a model's other parts are, and where the result goes."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """A model in, a model out.

    dtype: of the weights; what None means is said by who inherits this. tokenizer: a file, folder or Hub id. config: a
    CoreNet YAML or a config.json, where the source has none. instruct: whether to write a chat template; None asks the
    source's name and its folder. force: replace what is there. upload_repo: a Hub repository (your-name/model-name)
    that gets the folder; `upload_dry_run` only prints what would be sent.
    """

    dtype: str | None = None
    tokenizer: str | None = None
    config: str | Path | None = None
    revision: str | None = None
    offline: bool = False
    instruct: bool | None = None
    force: bool = False
    upload_repo: str | None = None
    upload_private: bool = False
    upload_dry_run: bool = False
