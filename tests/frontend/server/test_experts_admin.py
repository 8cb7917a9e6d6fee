"""The admin endpoints of experts and weights, as far as they read what they are sent."""

from pathlib import Path
from typing import Any

from moe_runtime.errors import InputError
from moe_runtime.frontend.server.experts_admin import add_experts_admin
from tests.frontend.server.client import run

ROOT = {"authorization": "Bearer root"}


class Served:
    """Reloads whatever it is asked for."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    async def reload(self, folder: Path) -> None:
        self.folders.append(folder)


def fit(folder: Path) -> None:
    if folder.name != "new":
        raise InputError(f"{folder}: another model")


def add(server: Any, served: Any) -> None:
    add_experts_admin(server.app._app, served, fit)


def test_a_reload_is_read_like_other_bodies_whatever_their_type_is_said_to_be(model):
    async def story(server, http):
        served = Served()
        add(server, served)
        for headers in (ROOT, {**ROOT, "content-type": "application/x-www-form-urlencoded"}):
            answer = await http.post("/admin/reload", content=b'{"path": "/new"}', headers=headers)
            assert (answer.status_code, answer.json()["status"]) == (200, "reloaded")
        assert served.folders == [Path("/new")] * 2
        for body, param, said in (
            (b"{}", "path", "path: is required"),
            (b'{"path": ""}', "path", "path: "),
            (b'{"path": 1}', "path", "path: "),
            (b'{"path": "/new", "force": true}', "force", "force: is not supported"),
            (b"path=/new", None, "not valid JSON"),
            (b'{"path": "/old"}', "path", "/old: another model"),
        ):
            answer = await http.post("/admin/reload", content=body, headers=ROOT)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert said in error["message"]
        assert len(served.folders) == 2

    run(model, story, admin_keys=["root"])


def test_an_unknown_part_of_a_path_is_refused_in_the_form_of_all_errors(model):
    async def story(server, http):
        add(server, Served())
        answer = await http.post("/admin/expert-load/forget", headers=ROOT)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "action", "invalid_value")
        assert "'start', 'stop' or 'dump'" in error["message"]
        document = (await http.get("/openapi.json")).json()
        body = document["paths"]["/admin/reload"]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"]["required"] == ["path"]

    run(model, story, admin_keys=["root"])
