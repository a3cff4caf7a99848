"""Takes pictures of the site's pages in headless Chromium: light and dark, wide and narrow.

`make docs`, then `python docs/photograph.py` writes `build/pictures/limits-dark-narrow-1.png` and so on. A long page
has several pictures, from top to bottom. `--pages limits start` and `--modes dark-narrow` take some only. It prints
what pictures do not show, and ends with status 1 for it: a page that is wider than the window, or in the wrong colours,
an error of a script, and what is fetched from elsewhere.

Chromium is asked through a pipe rather than by `--screenshot`: that has a window of 500 at least, and cuts the picture.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, BufferedWriter
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COLOURS = ("light", "dark")
WIDTHS = {"wide": 1400, "narrow": 420}
MODES = tuple("-".join(mode) for mode in product(COLOURS, WIDTHS))
HEIGHT = 900
"""Of the window."""
PART = 3000
"""The height of a picture, at most."""
OPTIONS = (
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
MEASURE = """new Promise((done) => {
  const seen = () => done({
    width: document.documentElement.scrollWidth, window: innerWidth, height: document.documentElement.scrollHeight,
    ground: getComputedStyle(document.body).backgroundColor,
  });
  document.readyState === "complete" ? setTimeout(seen, 100) : addEventListener("load", () => setTimeout(seen, 100));
})"""


class Browser:
    """A Chromium that shows one page at a time. It speaks the protocol of its developer tools on a pipe."""

    def __init__(self, read: BufferedReader, write: BufferedWriter) -> None:
        self.read, self.write = read, write
        self.messages = self._messages()
        self.count, self.session = 0, ""
        self.told: list[str] = []  # errors of scripts, and addresses elsewhere, of the page that is shown
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        # Each page is seen as by somebody who comes for the first time: the site remembers light or dark.
        self.ask("Page.addScriptToEvaluateOnNewDocument", source="localStorage.clear()")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the answer to a command; what else is told before it is noted.

        Raises:
            RuntimeError: the browser refuses, or has ended.
        """
        self.count += 1
        asked = {"id": self.count, "method": method, "params": params}
        self.write.write(json.dumps(asked | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        self.write.flush()
        for told in self.messages:
            if told.get("id") == self.count:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']['message']}")
                return dict(told["result"])
            self._note(told.get("method", ""), told.get("params", {}))
        raise RuntimeError(f"{method}: the browser has ended")

    def _messages(self) -> Iterator[dict[str, Any]]:
        text = b""
        while piece := self.read.read1(1 << 16):
            text += piece
            if text.endswith(b"\0"):
                whole, text = text.split(b"\0")[:-1], b""
                yield from map(json.loads, whole)

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            address = params["request"]["url"]
            if not address.startswith(("file:", "data:", "blob:", "about:")):
                self.told.append(f"fetches {address}")
        elif method == "Runtime.exceptionThrown":
            self.told.append(str(params["exceptionDetails"].get("exception", {}).get("description", "an exception")))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.told.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".rstrip())

    def show(self, page: Path, mode: str) -> tuple[int, list[str]]:
        """Shows a page; returns its height, and what is wrong with it.

        Args:
            mode: one of MODES.
        """
        colour, width = mode.split("-")
        self.told = []
        scheme = [{"name": "prefers-color-scheme", "value": colour}]
        self.ask("Emulation.setEmulatedMedia", media="screen", features=scheme)
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=WIDTHS[width], height=HEIGHT, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.ask("Page.navigate", url=page.as_uri())
        asked = {"expression": MEASURE, "awaitPromise": True, "returnByValue": True}
        seen = self.ask("Runtime.evaluate", **asked)["result"]["value"]
        wrong = [f"is {seen['width']} wide in a window of {seen['window']}"] if seen["width"] > seen["window"] else []
        ground = [float(number) for number in re.findall(r"[\d.]+", seen["ground"])][:3]
        if (max(ground) < 100) != (colour == "dark"):
            wrong.append(f"has the ground {seen['ground']}")
        return seen["height"], [*wrong, *self.told]

    def picture(self, width: int, top: int, height: int) -> bytes:
        """Returns a part of the page that is shown, as PNG."""
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        return base64.b64decode(self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """A region in which a browser runs."""
    commands, answers = os.pipe(), os.pipe()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        os.fdopen(answers[0], "rb") as read,
        os.fdopen(commands[1], "wb") as write,
    ):
        # A browser reads its commands from file 3, and answers in file 4.
        words = ["bash", "-c", f'exec "$@" 3<&{commands[0]} 4>&{answers[1]}', "bash", program]
        process = subprocess.Popen(
            [*words, *OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=(commands[0], answers[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands[0])
        os.close(answers[1])
        try:
            shown = Browser(read, write)
            yield shown
            shown.ask("Browser.close")
        finally:
            process.kill()
            process.wait()


def pages(site: Path, named: Sequence[str] = ()) -> dict[str, Path]:
    """The pages of a site by name, `benchmarks/README` for `benchmarks/README.html`; all, or those that are named.

    All but 404.html, which a server shows, with addresses from the server's root.

    Raises:
        SystemExit: a page that is named is not there, or none is.
    """
    found = {path.relative_to(site).with_suffix("").as_posix(): path for path in sorted(site.rglob("*.html"))}
    found.pop("404", None)
    if not found:
        sys.exit(f"{site} has no pages: make docs")
    if unknown := [name for name in named if name not in found]:
        sys.exit(f"{site} has no page {', '.join(unknown)}, but {', '.join(found)}")
    return {name: path for name, path in found.items() if not named or name in named}


def arguments(words: Sequence[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site", help="the folder of the built site")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "pictures", help="the folder for the pictures")
    parser.add_argument("--pages", nargs="+", default=[], metavar="PAGE", help="limits, benchmarks/README, ...: or all")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--parts", type=int, default=4, help=f"pictures of a page, {PART} high each, at most")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Takes the pictures; returns 1 if something is wrong with a page, else 0."""
    args = arguments(words)
    found = pages(args.site.resolve(), args.pages)
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit("no browser: apt-get install chromium")
    args.out.mkdir(parents=True, exist_ok=True)
    wrong = False
    with browser(program) as shown:
        for (name, page), mode in product(found.items(), args.modes):
            height, told = shown.show(page, mode)
            for line in told:
                print(f"{name}, {mode}: {line}")
            wrong |= bool(told)
            for part, top in enumerate(range(0, height, PART)[: args.parts], 1):
                data = shown.picture(WIDTHS[mode.split("-")[1]], top, min(PART, height - top))
                (args.out / f"{name.replace('/', '-')}-{mode}-{part}.png").write_bytes(data)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
