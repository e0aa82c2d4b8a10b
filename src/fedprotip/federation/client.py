"""A client: everything one site runs. It has one way in and out, and works from messages alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedprotip import settings as settings_file
from fedprotip.federation.parcels import KNOWLEDGE, LOST, MODEL, PLAN, SECURE, START, Ask, answering
from fedprotip.federation.secure.demands import NONE, Demands
from fedprotip.federation.secure.desk import Desk
from fedprotip.messages import BadMessage, Message, Parcel
from fedprotip.methods import create_method
from fedprotip.methods.local import Belongings, Local
from fedprotip.methods.site import Site
from fedprotip.models import build_network
from fedprotip.models.prefix import PrefixCache
from fedprotip.models.state import device_of, full_state, load_state
from fedprotip.settings import tomltext
from fedprotip.store.files import Tensors
from fedprotip.store.plain import PlainFolder
from fedprotip.store.site import SiteFolder
from fedprotip.stream.holdings import Holding

if TYPE_CHECKING:
    from fedprotip.federation.secure.signed import Signer


class Client:
    """Its own model, what it was told, its own state in a folder, and its holding of data.

    Killed and started again from its folder it goes on where it stood. It never sees the server's objects, a setting
    that it was not sent, or samples that are not in its holding.
    """

    def __init__(
        self,
        folder: Path,
        holding: Holding,
        cache: PrefixCache | None = None,
        signer: "Signer | None" = None,
        demands: Demands = NONE,
    ) -> None:
        """`cache`: to share with other clients of this process; by default its own. `signer`: of a site with a key.

        demands: of every plan.
        """
        self._demands = demands
        self._folder, self._holding, self._cache = SiteFolder(folder), holding, cache
        self._site: Site | None = None
        self._plan = Message(PLAN)
        self._stands: tuple[int, str] | None = None  # question, and life of the server, after which it is as on disk
        self._desk = Desk(PlainFolder(folder, folder.parent), signer)

    def handle(self, parcel: Parcel) -> Message:
        """Take in what the parcel brings and answer its question; the state after it is on disk then.

        A client that is not where the server believes it to be answers with a message of kind "lost": it must be sent
        everything anew.
        """
        ask = Ask.of(parcel[0])
        if not self._stand_at(ask):
            return Message(LOST, meta={"since": ask.since})
        self._stands = None
        for message in parcel[1:]:
            if message.kind != SECURE:
                self._take(message, ask)
        site = self._site
        assert site is not None, "the first parcel brings the plan"
        exchange = site.method.exchange(ask.exchange)
        if exchange.needs_model and not ask.bare:
            self._begin(ask.task)
        site.network.eval()
        own = Belongings(self._folder.store, self._holding.client, site.method.state)
        local = Local(site, self._holding, self._inputs(site), own, ask.task, ask.round)
        trains = exchange.trains and not ask.bare
        received = {name: tensor.clone() for name, tensor in site.changeable().items()} if trains else {}
        try:
            with torch.no_grad():
                return answering(self._desk.answer(exchange, local, ask, parcel), ask)
        finally:
            load_state(site.network, received)
            self._save(ask)

    def rest(self) -> None:
        """Give the memory of the model back; the next question finds everything in the folder."""
        self._site = self._stands = None
        self._folder = SiteFolder(self._folder.path)  # the former one holds what it saved last

    def close(self) -> None:
        """Remove what was only for speed, and secrets of a sum that is not over; the folder stays."""
        self._desk.close()
        if self._cache:
            self._cache.close()

    def _stand_at(self, ask: Ask) -> bool:
        """Whether this client holds what it was told up to the question `ask.since`, and nothing that came later.

        None: it is told everything anew.
        """
        if ask.since is not None and self._stands == (ask.since, ask.then):
            return True
        self._site = self._stands = None  # a server that goes back must not find anything in memory
        if ask.since is None:
            self._plan = Message(PLAN, meta=self._folder.keep_private(before=ask.step).get("plan", {}))
            return True
        found = self._folder.restore(ask.since, ask.then)
        if found is None:
            return False
        try:
            self._restore(*found)
        except BadMessage:  # a plan that this site takes no part in
            raise
        except Exception:  # however another version wrote it: sent everything anew, the client takes part again
            self._site = None
            return False
        return True

    def _restore(self, state: dict[str, Any], groups: dict[str, Tensors]) -> None:
        self._take_plan(Message(PLAN, meta=state["plan"]))
        site = self._site
        assert site is not None
        site.grow(state["heads"] - 1)
        load_state(site.network, groups["model"] | groups["moving"])
        site.known.update(groups["known"])
        site.start = {name: tensor.to(site.device) for name, tensor in groups["start"].items()}
        if state["task"] >= 0:
            site.begin_task(state["task"])

    def _take(self, message: Message, ask: Ask) -> None:
        """A message that comes with a question: a plan, all knowledge, a model, or what an exchange has led to."""
        if message.kind == PLAN:
            self._take_plan(message)
            return
        site = self._site
        assert site is not None, "the first parcel brings the plan"
        if message.kind == KNOWLEDGE:
            site.known.clear()
            site.known.update(message.tensors)
        elif message.kind == MODEL:
            site.grow(ask.task)
            load_state(site.network, {n[len(START) :]: t for n, t in message.tensors.items() if n.startswith(START)})
            self._begin(ask.task)
            news = {name: tensor for name, tensor in message.tensors.items() if not name.startswith(START)}
            if news:
                site.hear(news)
        else:
            self._begin(ask.task)
            exchange = site.method.exchange(message.kind)
            if exchange.when == "end" and exchange.settles:
                site.settle()
            exchange.receive(message, site)

    def _begin(self, task: int) -> None:
        """At the first message of a task this client holds W^(t,0)."""
        assert self._site is not None
        if self._site.task != task:
            self._site.settle()
            self._site.begin_task(task)

    def _take_plan(self, message: Message) -> None:
        """What is to be learned and how; a longer plan comes when a run is extended."""
        meta = message.meta
        settings = settings_file.load(tomltext.loads(meta["settings"]))
        self._demands.check(settings.method, "this site")
        if began := self._plan.meta:
            Demands.of(settings_file.load(tomltext.loads(began["settings"])).method).check(settings.method, "its run")
        method, before = create_method(settings), self._site
        shape = (meta["image"][0], meta["image"][1], meta["image"][2])
        network = before.network if before else build_network(settings, shape, method.routes)
        network.to(device_of(settings.run.device))
        classes, look = [tuple(known) for known in meta["classes"]], self._holding.stream.look
        self._site = Site(settings, method, network, classes, shape, look)
        if before:
            self._site.known.update(before.known)
        self._plan, self._desk.run = message, meta.get("run", "")

    def _inputs(self, site: Site) -> PrefixCache:
        if self._cache is None:
            self._cache = PrefixCache(
                self._holding.stream, site.settings, self._folder.path, enabled=not site.method.sees_images
            )
        return self._cache

    def _save(self, ask: Ask) -> None:
        site = self._site
        assert site is not None
        moving = site.moving() if site.task >= 0 else {}
        groups: dict[str, Tensors] = {
            "model": {name: tensor for name, tensor in full_state(site.network).items() if name not in moving},
            "moving": moving,
            "known": dict(site.known),
            "start": site.start,
        }
        state = {"plan": self._plan.meta, "task": site.task, "heads": len(site.network.labels), "life": ask.life}
        self._folder.save(ask.step, state, groups, ask.keep)
        self._stands = ask.step, ask.life
