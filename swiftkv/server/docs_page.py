"""`/docs`: the OpenAPI document as one page without scripts, which loads nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{font-size:1.1rem;margin:2rem 0 .3rem}code,pre{font:14px/1.4 ui-monospace,monospace}"
    "pre{background:#8881;padding:.8rem;overflow:auto}td,th{padding:.1rem 1rem .1rem 0;text-align:left}"
    ":root{color-scheme:light dark}"
)


def docs_page(document: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    body = "\n".join([*_operations(document), *_schemas(document)])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>For programs: <a href="openapi.json">openapi.json</a></p>\n{body}</html>'
    )


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{escape(operation.get('description', operation.get('summary', '')))}</p>"
            for scheme in operation.get("security", ()):
                yield f"<p>Asks for the key: {escape(', '.join(scheme))}</p>"
            if parameters := operation.get("parameters"):
                yield _table(
                    (escape(f"{parameter['name']} ({parameter['in']})"), escape(parameter.get("description", "")))
                    for parameter in parameters
                )
            if content := operation.get("requestBody", {}).get("content"):
                yield f"<p>Body: {_links(content)}</p>"
            yield _table(
                (status, escape(answer.get("description", "")), _links(answer.get("content", {})))
                for status, answer in operation["responses"].items()
            )


def _schemas(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<h1>Schemas</h1>"
    for name, schema in document["components"]["schemas"].items():
        text = escape(json.dumps(schema, indent=2, ensure_ascii=False))
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary><pre>{text}</pre></details>'


def _links(content: Mapping[str, Any]) -> str:
    """Return the media types of a body, each with a link to its schema where that has a name."""
    links = []
    for media_type, body in content.items():
        reference = body.get("schema", {}).get("$ref", "")
        name = escape(reference.rpartition("/")[2])
        links.append(f'<a href="#{name}"><code>{name}</code></a>' if name else escape(media_type))
    return ", ".join(links)


def _table(rows: Iterator[tuple[str, ...]]) -> str:
    """Return a table of cells that are HTML already."""
    cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
