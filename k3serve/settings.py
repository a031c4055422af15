"""What the command line decides, as one frozen value, validated once.

Rule: every error names the flag, the value and what is allowed. See `python -m k3serve --help`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from k3serve.errors import ConfigError
from k3serve.types import SNAPSHOT_EVERY, TickShape

NANO = Path(__file__).parent / "assets" / "nano"
DTYPES = ("auto", "float32", "bfloat16")
COMMON = (
    "max_slots", "context", "page_tokens", "pages_per_tick", "steps_per_tick", "dtype", "experts",
    "allow_reserved", "ranks", "rows", "tile_slots", "acceptance", "markov_top", "prefix_cache_mib",
)  # fmt: skip
DAY_S = 86_400  # timers take no arbitrary number
EXPERT_FORMATS = ("auto", "dense", "packed")
FRONTS = ("process", "thread")
ACCEPTANCE = ("coupled", "block", "token", "onehot")
NO_DRAFT = "none"
DEFAULT_ROWS = 8
CPU_TILE = 2  # a CPU computes what it is given; a pod streams its weights once for all slots
ROWS = (1, 2, 4, 8)
CPU_CACHE_MIB, CACHE_MIB = 64, 1024
MAX_SNAPSHOTS = 1024


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Settings of `serve`. Sizes must be equal on all hosts of a run."""

    checkpoint: Path = NANO
    # HTTP, on process 0
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()  # empty: the checkpoint folder's name
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_mib: int = 32
    body_memory_mib: int = 512
    max_connections: int = 512
    request_timeout_s: float = 3600.0  # 0: none
    front: str = "process"
    restart: bool = False
    resume: bool = False
    # engine
    max_slots: int = 8
    context: int | None = None  # None: the model's own, at most 8192
    page_tokens: int = 64
    pages_per_tick: int = 4
    steps_per_tick: int = 8
    max_queue: int = 256
    prefix_cache_mib: int | None = None  # on each rank; None: 64 on CPU, else 1024; 0: no reuse
    dtype: str = "auto"
    experts: str = "auto"
    allow_reserved: bool = False
    # speculation
    draft: str = "auto"  # a folder; auto: the checkpoint's folder "draft", if there; or none
    rows: int | None = None  # None: 8 with a draft, else 1
    acceptance: str = "coupled"
    markov_top: int | None = None
    tile_slots: int | None = None  # None: all; on CPU 2 where a step has several rows
    sync: bool = False
    tick_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    # hosts and ranks
    ranks: int | None = None  # None: all devices; on CPU, one a host
    hosts: int | None = None  # start so many hosts on this machine
    coordinator: str | None = None
    num_hosts: int | None = None
    host_id: int | None = None
    connect_timeout_s: int = 300

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_body_mib", 1, 4096),
            ("body_memory_mib", 1, 1 << 20),
            ("max_connections", 1, 65536),
            ("max_slots", 1, 1024),
            ("page_tokens", 16, 4096),
            ("pages_per_tick", 1, 1024),
            ("steps_per_tick", 1, 1024),
            ("max_queue", 1, 1_000_000),
            ("markov_top", 1, 1 << 24),
            ("prefix_cache_mib", 0, 1 << 20),
        ):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), low, high)
        self._check_rows()
        if self.page_tokens % 16:
            raise ConfigError(f"--page-tokens {self.page_tokens}: must be a multiple of 16")
        if self.context is not None:
            _check("context", self.context, self.page_tokens, 1 << 24)
        for name in ("ranks", "hosts", "num_hosts"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), 1, 65536)
        # an idle leader ticks four times a second: followers must not take that for a hang
        _check("tick_timeout_s", self.tick_timeout_s, 1, DAY_S)
        _check("drain_timeout_s", self.drain_timeout_s, 0, DAY_S)
        _check("request_timeout_s", self.request_timeout_s, 0, DAY_S)
        _check("connect_timeout_s", self.connect_timeout_s, 1, DAY_S)
        if not self.host.strip():
            raise ConfigError("--host is empty; for all addresses say 0.0.0.0")
        self._check_front()
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: use one of {', '.join(DTYPES)}")
        if self.experts not in EXPERT_FORMATS:
            raise ConfigError(f"--experts {self.experts}: use one of {', '.join(EXPERT_FORMATS)}")
        if self.acceptance not in ACCEPTANCE:
            raise ConfigError(f"--acceptance {self.acceptance}: use one of {', '.join(ACCEPTANCE)}")
        if not self.draft.strip():
            raise ConfigError("--draft is empty: name a draft's folder, or say auto or none")
        self._check_hosts()

    def _check_front(self) -> None:
        if self.front not in FRONTS:
            raise ConfigError(f"--front {self.front}: use one of {', '.join(FRONTS)}")
        if self.restart and self.front == "thread":
            raise ConfigError("--restart: HTTP must outlive the engine; leave out --front thread")
        if self.resume and not self.restart:
            raise ConfigError("--resume: requests go on in the next engine; add --restart")

    def _check_rows(self) -> None:
        if self.rows is not None and self.rows not in ROWS:
            raise ConfigError(
                f"--rows {self.rows}: use 1, 2, 4 or 8; of others not all round alike"
            )
        if self.tile_slots is not None and self.tile_slots not in self._tiles():
            raise ConfigError(
                f"--tile-slots {self.tile_slots}: must divide --max-slots {self.max_slots} and be "
                f"1, 2, 4 or a multiple of 8; use one of {', '.join(map(str, self._tiles()))}"
            )
        if self.draft not in ("auto", NO_DRAFT) and self.rows == 1:
            raise ConfigError(f"--draft {self.draft}: --rows 1 leaves no room for drafts")

    def _tiles(self) -> tuple[int, ...]:
        """How many slots a tile may have. Vector code treats what is left over after whole vectors
        otherwise, so in tiles of other sizes a slot's last bits would depend on its place.
        """
        sizes = (1, 2, 4, *range(8, self.max_slots + 1, 8))
        return tuple(size for size in sizes if self.max_slots % size == 0)

    def _check_hosts(self) -> None:
        others = (self.num_hosts, self.coordinator, self.host_id)
        if self.hosts is not None and others != (None, None, None):
            raise ConfigError(
                f"--hosts {self.hosts} starts all hosts on this machine: leave out --coordinator, "
                "--num-hosts and --host-id, which join hosts that were started one by one"
            )
        if self.num_hosts is None:
            if self.coordinator or self.host_id is not None:
                raise ConfigError("--coordinator and --host-id need --num-hosts")
            return
        if self.num_hosts > 1:
            if self.coordinator is None or self.host_id is None:
                raise ConfigError(
                    f"--num-hosts {self.num_hosts} needs --coordinator HOST:PORT (of host 0) and "
                    "--host-id"
                )
            host, _, port = self.coordinator.rpartition(":")
            if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ConfigError(
                    f"--coordinator {self.coordinator}: must be HOST:PORT, the address of host 0 "
                    "and a port that is free there"
                )
        if self.host_id is not None and not 0 <= self.host_id < self.num_hosts:
            raise ConfigError(
                f"--host-id {self.host_id}: must be 0 to {self.num_hosts - 1} "
                f"with --num-hosts {self.num_hosts}"
            )

    def has_front(self) -> bool:
        """Whether this process is a front: on a host that may lead, or is to be restarted."""
        if self.front == "thread":
            return False
        return self.restart or self.host_id in (None, 0)

    def common(self) -> dict[str, str]:
        """Flags that must be equal on all hosts, with their values."""
        values = {_flag(name): getattr(self, name) for name in COMMON}
        return {flag: "its default" if v is None else str(v) for flag, v in values.items()}

    def draft_dir(self) -> Path | None:
        """The draft's folder, or None for a run without drafts. Raises ConfigError."""
        if self.draft == NO_DRAFT or self.rows == 1:
            return None
        if self.draft == "auto":
            found = self.checkpoint / "draft"
            return found if found.is_dir() else None
        folder = Path(self.draft)
        if not folder.is_dir():
            raise ConfigError(
                f"--draft {self.draft}: no such folder; name the folder of a draft's config.json, "
                "or say auto or none"
            )
        return folder

    def _rows(self, draft_block: int | None) -> int:
        """R; draft_block: how many drafts the draft model makes at most, None without one."""
        if draft_block is None:
            return self.rows or (DEFAULT_ROWS if self.draft == NO_DRAFT else 1)
        fitting = [rows for rows in ROWS if rows <= draft_block + 1]
        if self.rows is not None and self.rows not in fitting:
            raise ConfigError(
                f"--rows {self.rows}: the draft guesses {draft_block} tokens at a time, which with "
                f"the anchor makes {draft_block + 1} rows; use at most {fitting[-1]}"
            )
        return self.rows or fitting[-1]

    def _tile(self, rows: int, on_cpu: bool) -> int:
        if self.tile_slots is not None:
            return self.tile_slots
        most = CPU_TILE if on_cpu and rows > 1 else self.max_slots
        return max(size for size in self._tiles() if size <= most)

    def with_prefix_cache(
        self, shape: TickShape, snapshot_bytes: int, page_bytes: int, on_cpu: bool
    ) -> TickShape:
        """The shape with snapshots, and cache pages beside those of the slots, from the budget.

        Sizes are those on one rank. Raises ConfigError where the budget holds no snapshot at all.
        """
        mib = self.prefix_cache_mib
        if mib == 0:
            return shape
        budget = (CPU_CACHE_MIB if on_cpu else CACHE_MIB) if mib is None else mib
        each = snapshot_bytes + SNAPSHOT_EVERY * page_bytes
        count = min((budget << 20) // each, MAX_SNAPSHOTS)
        if count == 0 and mib is not None:
            raise ConfigError(
                f"--prefix-cache-mib {mib}: one snapshot with its pages takes "
                f"{-(-each >> 20)} MiB on a rank; give at least that, or 0 for no reuse"
            )
        pages = shape.num_pages + SNAPSHOT_EVERY * count
        return replace(shape, num_snapshots=count, num_pages=pages)

    def tick_shape(
        self, model_context: int, draft_block: int | None = None, on_cpu: bool = True
    ) -> TickShape:
        """The fixed sizes of this run; model_context is the most tokens the model was made for."""
        page = self.page_tokens
        context = self.context or min(model_context, 8192) // page * page
        if context > model_context:
            raise ConfigError(
                f"--context {context}: the model's own limit is {model_context}; use at most that"
            )
        if context == 0:
            raise ConfigError(
                f"--page-tokens {page}: a page must fit the model's context of {model_context}"
            )
        if context % page:
            raise ConfigError(
                f"--context {context}: must be whole pages of --page-tokens {page}; "
                f"use {context // page * page}"
            )
        pages_per_slot = context // page
        rows = self._rows(draft_block)
        return TickShape(
            max_slots=self.max_slots,
            page_tokens=self.page_tokens,
            pages_per_tick=self.pages_per_tick,
            steps_per_tick=self.steps_per_tick,
            rows=rows,
            tile_slots=self._tile(rows, on_cpu),
            pages_per_slot=pages_per_slot,
            num_pages=pages_per_slot * self.max_slots,
        )


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


def _check(name: str, value: float, low: int, high: int) -> None:
    if not low <= value <= high:  # false for NaN too
        raise ConfigError(f"{_flag(name)} {value}: must be {low} to {high}")
