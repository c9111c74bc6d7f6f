"""Tools that a row offers and calls of them, in the form that chat templates take.

A tool is `{"type": "function", "function": {"name", "description", "parameters"}}`, and a call is `{"type": "function",
"function": {"name", "arguments"}}` with the arguments as an object, as transformers documents for chat templates.
"""

from typing import Any

from tpu_experiments.data.reading.fields import BadRow, Record, from_json, is_empty

ARGUMENTS = ("arguments", "parameters", "args", "kwargs", "input")


def tools_of(given: Any) -> list[Any]:
    """Return the tools that a row offers: a list or one of them, each an object or its JSON, or the JSON of all.

    A bare function (`functions` of OpenAI's old API, xLAM, ShareGPT) is wrapped, as LLaMA-Factory and servers do, so
    that a model is trained on the text that it is later asked with.

    Raises:
        BadRow: they are no functions with names.
    """
    tools = from_json(given)
    if is_empty(tools):
        return []
    tools = [from_json(tool) for tool in (tools if isinstance(tools, list) else [tools])]
    if not all(isinstance(_function(tool).get("name"), str) for tool in tools):
        raise BadRow("bad_tools", "has tools that are no list of functions with names; mend or remove the row.")
    return [tool if "function" in tool else _wrapped(tool) for tool in tools]


def _function(tool: Any) -> dict[str, Any]:
    found = tool.get("function", tool) if isinstance(tool, dict) else {}
    return found if isinstance(found, dict) else {}


def _wrapped(function: dict[str, Any]) -> dict[str, Any]:
    # "input_schema" is Anthropic's name for the parameters.
    names = {"input_schema": "parameters"}
    bare = {names.get(name, name): value for name, value in function.items() if name != "type"}
    return {"type": "function", "function": bare}


def calls_of(given: Any, *, number: int, unread: set[str], path: str) -> list[dict[str, Any]]:
    """Return the calls of turn `number`: a list or one of them, each an object or its JSON, or the JSON of all.

    Args:
        unread: gets the names of fields that were not read, after `path`.

    Raises:
        BadRow: they are no calls.
    """
    calls = from_json(given)
    if isinstance(calls, dict):
        return [_call(calls, number=number, unread=unread, path=path)]
    if not isinstance(calls, list):
        raise BadRow("bad_call", f"has tool_calls in turn {number} that are no list; mend or remove the row.")
    return [_call(from_json(call), number=number, unread=unread, path=f"{path}[]") for call in calls]


def _call(given: Any, *, number: int, unread: set[str], path: str) -> dict[str, Any]:
    """Normalise a call: arguments as an object, not as JSON as in OpenAI's API."""
    call = Record(given if isinstance(given, dict) else {})
    kind = call.find("type")
    inner = call.find("function")
    function = call if inner is None else Record(inner[1] if isinstance(inner[1], dict) else {})
    name, arguments = function.find("name"), function.find(*ARGUMENTS)
    if kind is not None and kind[1] != "function":
        call.unmark(kind[0])
    values = from_json(arguments[1]) if arguments is not None else None
    if name is None or not isinstance(name[1], str) or not name[1] or not isinstance(values, dict | None):
        raise BadRow(
            "bad_call",
            f"has a call of a tool in turn {number} without a function's name, or with arguments that are no object; "
            "mend or remove the row.",
        )
    called: dict[str, Any] = {"type": "function", "function": {"name": name[1], "arguments": values or {}}}
    own = call.find("id", "call_id", "tool_call_id")
    if own is not None and isinstance(own[1], str):
        called["id"] = own[1]
    elif own is not None:
        call.unmark(own[0])
    unread.update(f"{path}.{name}" for name in call.unread)
    if inner is not None:
        unread.update(f"{path}.{inner[0]}.{name}" for name in function.unread)
    return called
