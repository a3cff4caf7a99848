"""What setup.cfg cannot say: the description for an index of packages, and links in the source distribution."""

import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

REPOSITORY = ""  # The address of the repository; the urls and the links of the description follow from it.
LINKS = ("autotp/models", "autotp/passes", "src/autotp")  # CONTRIBUTING.md says what they are for.
HERE = Path(__file__).resolve().parent
MARKUP = re.compile(
    r"```.*?```|`[^`\n]*`"  # code, which stays as it is
    r"|(?P<image>!?)\[(?P<text>[^]]*)\]\((?!\w+:|#)(?P<to>[^)\s]+)\)"
    r'|(?P<tag><(?:img|source)\b[^>]*?\bsrc(?:set)?=")(?!\w+:)(?P<file>[^"]+)(?P<rest>"[^>]*>)',
    re.DOTALL,
)


def description(readme: str, repository: str) -> str:
    """Returns README.md for readers elsewhere.

    A link to a file of the repository becomes absolute. Where there is no address, its text stays, and a picture goes.
    """

    def elsewhere(match: re.Match[str]) -> str:
        if match["to"]:
            to = f"{repository}/{'raw' if match['image'] else 'blob'}/main/{match['to']}"
            text = "" if match["image"] else match["text"]
            return f"{match['image']}[{match['text']}]({to})" if repository else text
        if match["file"]:
            return f"{match['tag']}{repository}/raw/main/{match['file']}{match['rest']}" if repository else ""
        return match[0]

    return MARKUP.sub(elsewhere, readme)


class Source(sdist):
    """Packs links as links: otherwise what lies behind a link would be packed once for each way to it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Writes the files at their real places, then the links."""
        super().make_release_tree(base_dir, sorted({os.path.relpath(os.path.realpath(file)) for file in files}))
        for link in LINKS:
            place = Path(base_dir, link)
            place.parent.mkdir(exist_ok=True)
            place.symlink_to(os.readlink(link), target_is_directory=True)


if __name__ == "__main__":
    pages = {
        "Source": "",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Documentation": "/tree/main/docs",
        "Issues": "/issues",
    }
    setup(
        long_description=description((HERE / "README.md").read_text(encoding="utf-8"), REPOSITORY),
        project_urls={name: REPOSITORY + path for name, path in pages.items()} if REPOSITORY else {},
        cmdclass={"sdist": Source},
    )
