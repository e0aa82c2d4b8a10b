"""A deployment: one TOML file that says where the SuperLink is, which sites there are, and what is run over them.

settings = "run.toml"           # what is run
out = "runs/mine"               # its run folder, on the machine of the SuperLink

[superlink]
host = "127.0.0.1"
port = 9092

[[sites]]                       # those of this machine
client = 0
data = {source = "photos"}
"""

import os
import re
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from fedprotip import settings as settings_file
from fedprotip.envelopes import SWITCHES
from fedprotip.errors import UsageError, nearest, shortened
from fedprotip.settings import DataSettings, PathText, Section, tomltext

Client = Annotated[int, Field(ge=0, lt=10**9)]


class SuperLink(Section):
    host: str = Field("127.0.0.1", description="Its name or address, as sites reach it.")
    listen: str = Field("", description="Address at which it listens; empty: host. 0.0.0.0: all of this machine.")
    port: int = Field(9092, ge=1, le=65535, description="The one port that is open to sites.")
    here: bool = Field(True, description="Whether it runs on this machine; false in the file of a site.")
    tls: bool = Field(True, description="Encrypted; certificates are made where there are none.")
    keys: bool = Field(False, description="Sites are known by keys, and nobody else is let in; needs tls.")
    authority: PathText = Field("", description="The SuperLink's ca.crt; empty: that of home.")

    @field_validator("host", "listen")
    @classmethod
    def _machine(cls, value: str, info: ValidationInfo) -> str:
        """A name, or an address in its one form."""
        if not value and info.field_name == "listen":
            return value
        try:
            return str(ip_address(value.removeprefix("[").removesuffix("]")))
        except ValueError:
            if len(value) > 253 or not all(re.fullmatch("[A-Za-z0-9_-]{1,63}", part) for part in value.split(".")):
                raise ValueError(
                    f"{shortened(value)!r} is no address, and no name of a machine (letters, digits, '-' and '.'; its "
                    "port is superlink.port)"
                ) from None
            return value


class SiteEntry(Section):
    client: Client = Field(description="Which client of the run this site is.")
    folder: PathText = Field("", description="Its private state; empty: site-CLIENT in home.")
    key: PathText = Field("", description="Its private key; empty: site-CLIENT.key in home, made where it is missing.")
    roster: PathText = Field(
        "",
        description="Lines CLIENT PUBLIC-KEY of all clients, whose keys must sign secure sums; empty: the first key "
        "that is seen of a client is believed, and kept in folder as known-keys.",
    )
    secure: bool = Field(False, description="Whether it takes part in runs with method.secure alone.")
    secure_share: float = Field(0.5, ge=0.5, le=1, description="The least method.secure_share that it takes.")
    secure_noise: float = Field(0.0, ge=0, description="The least method.secure_noise that it takes.")
    data: DataSettings | None = Field(None, description="Its own data; left out: the data of the settings.")
    own: bool | None = Field(
        None,
        description="Whether all of that data is this site's; else it has its share of it, as clients in one process "
        "have. Left out: yes, if it has data of its own.",
    )


class Deployment(Section):
    settings: PathText = Field("", description="Settings of the run.")
    out: PathText = Field("", description="Its run folder.")
    home: PathText = Field("", description="Certificates, keys, logs; empty: the name of this file, without .toml.")
    superlink: SuperLink = SuperLink()
    sites: list[SiteEntry] = Field([], description="Sites of this machine.")

    @field_validator("sites")
    @classmethod
    def _every_client_once(cls, value: list[SiteEntry]) -> list[SiteEntry]:
        clients = [site.client for site in value]
        if twice := {client for client in clients if clients.count(client) > 1}:
            raise ValueError(f"client {min(twice)} is named twice")
        return value


class Place:
    """A deployment file, and where everything is that it names."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        raw = tomltext.read(self.path)
        try:
            self.what = Deployment.model_validate(raw)
        except ValidationError as error:
            raise UsageError(f"{path}: {_sentence(error)}.") from None
        if self.what.superlink.keys and not self.what.superlink.tls:
            raise UsageError("superlink.keys needs superlink.tls = true: keys are of no use on an open line.")
        if not self.what.superlink.keys and any(site.roster for site in self.what.sites):
            raise UsageError("sites.roster needs superlink.keys = true: sites without keys sign nothing.")
        if any(not site.secure and (site.secure_share > 0.5 or site.secure_noise) for site in self.what.sites):
            raise UsageError("sites.secure_share and sites.secure_noise need secure = true in the same entry.")
        self.home = self.at(self.what.home or self.path.stem)

    def at(self, path: str) -> Path:
        """A path of the file, which is relative to it."""
        return Path(os.path.normpath(self.path.parent / path))

    def needed(self, key: str) -> Path:
        """A path that this command needs."""
        value = getattr(self.what, key)
        if not value:
            raise UsageError(f"{self.path} has no {key!r}; say it there.")
        return self.at(value)

    @property
    def address(self) -> str:
        host, port = self.what.superlink.host, self.what.superlink.port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def authority(self) -> Path:
        return self.at(self.what.superlink.authority) if self.what.superlink.authority else self.home / "ca.crt"

    def site(self, client: int) -> SiteEntry:
        for site in self.what.sites:
            if site.client == client:
                return site
        known = ", ".join(str(site.client) for site in self.what.sites) or "none"
        raise UsageError(f"{self.path} has no site of client {client}; it has: {known}.")

    def folder_of(self, site: SiteEntry) -> Path:
        return self.at(site.folder) if site.folder else self.home / f"site-{site.client}"

    def key_of(self, site: SiteEntry) -> Path:
        return self.at(site.key) if site.key else self.home / f"site-{site.client}.key"

    def data_of(self, site: SiteEntry) -> tuple[DataSettings, bool]:
        """What a site reads, and whether all of it is its own."""
        own = site.data is not None if site.own is None else site.own
        if site.data is None:
            return settings_file.load(self.needed("settings")).data, own
        raw: dict[str, Any] = {"data": site.data.model_dump(exclude_unset=True)}
        return settings_file.load(settings_file.joined(raw, self.path.parent)).data, own

    def environment(self, home: Path) -> dict[str, str]:
        """For processes of Flower: its switches, a home that is ours, and the programs of this Python first.

        No other setting of Flower's that this environment happens to have (some of them make it call services), and no
        proxy between processes of this machine, by whatever name they call each other.
        """
        programs = str(Path(sys.executable).parent)
        path = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
        ours = {"FLWR_HOME": str(home), "PATH": path, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
        here = ["127.0.0.1", "localhost", "::1", *([self.what.superlink.host] if self.what.superlink.here else [])]
        direct = {name: ",".join(filter(None, [os.environ.get(name), *here])) for name in ("NO_PROXY", "no_proxy")}
        return {**kept, **direct, **SWITCHES, **ours}


def _sentence(error: ValidationError) -> str:
    """The first problem of a file, a key that nobody knows before others: what is missing may be that."""
    problems = error.errors()
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    path = [str(part + 1) if isinstance(part, int) else part for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        tables: dict[str, type[Section]] = {"superlink": SuperLink, "sites": SiteEntry, "data": DataSettings}
        table = next((tables[part] for part in reversed(path[:-1]) if part in tables), Deployment)
        return f"{'.'.join(path)} is not a setting; {nearest(path[-1], table.model_fields)}"
    told = problem["msg"].removeprefix("Value error, ")
    return f"{'.'.join(path)}: {told[:1].lower()}{told[1:]}"
