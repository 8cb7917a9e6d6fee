"""Routes: where the requests of one frontend are, and what that takes of every rank.

One router per role. A request that is prefilled and decoded apart has a place in both until its prompt
has run. Knows no sockets, no clock.
"""

from moe_runtime.engine.messages import Full, Status
from moe_runtime.frontend.bootstrap import RankAddress
from moe_runtime.frontend.live import Live, Route
from moe_runtime.frontend.router import Router, Target, role_router


class Routes:
    """`bounded`: no rank is sent more than it has room for, as far as is known here."""

    def __init__(self, ranks: list[RankAddress], *, bounded: bool) -> None:
        self._roles = {Target(r.instance, r.rank): r.deployment for r in ranks}
        self._routers = {
            role: _router([r for r in ranks if r.deployment == role], bounded=bounded)
            for role in dict.fromkeys(self._roles.values())
        }
        self.entry = "unified" if "unified" in self._routers else "prefill"

    def router(self, role: str) -> Router:
        """The router of a role."""
        return self._routers[role]

    def assign(self, live: Live, role: str) -> None:
        """A place for the request at a rank of the role that has not turned it away yet.

        Where requests enter, that is the rank which the request names, if it names one.

        Raises RequestRefused, NoRoom among them, as `Router.assign` does; then it has no place in the role.
        """
        self.leave(live, role)
        request = live.request
        tokens = len(request.prompt) + (0 if role == "prefill" else request.sampling.max_tokens)
        router, tried = self._routers[role], live.tried.get(role, ())
        rank = live.rank if role == self.entry else None
        index = router.assign(tokens, prompt=request.prompt, rank=rank, besides=tried)
        live.routes[role] = Route(router.targets[index], index, tokens)

    def leave(self, live: Live, role: str) -> None:
        """Give up the request's place in the role, if it has one."""
        route = live.routes.pop(role, None)
        if route is not None:
            self._routers[role].finished(route.index, route.tokens)

    def observe(self, status: Status) -> None:
        """A rank's status came."""
        router = self._routers[status.deployment]
        router.observe(
            router.targets.index(Target(status.instance, status.rank)),
            others_tokens=status.others_tokens,
            others_requests=status.others_requests,
        )

    def turned_away(self, live: Live | None, message: Full) -> str:
        """A rank has no room for a request, which loses its place there; the role of the rank."""
        target = Target(message.instance, message.rank)
        role = self._roles[target]
        index = self._routers[role].targets.index(target)
        if live is not None:
            live.tried.setdefault(role, set()).add(index)
            self.leave(live, role)
        self._routers[role].full(index, tokens=message.tokens, requests=message.requests)
        return role


def _router(ranks: list[RankAddress], *, bounded: bool) -> Router:
    """The router of one role; the smallest of its ranks is what all are taken to be."""
    return role_router(
        ranks[0].deployment,
        [Target(r.instance, r.rank) for r in ranks],
        kv_tokens=min(r.kv_tokens for r in ranks),
        max_sequences=min(r.max_sequences for r in ranks),
        bounded=bounded,
    )
