"use strict";
const field = (id) => document.getElementById(id);
const STOPPED = "stopped";
const token = new URLSearchParams(location.search).get("token");
const sides = [...document.querySelectorAll(".side")].map((node) => ({
  model: node.dataset.model, log: node.querySelector(".turns"), turns: [], running: null,
}));

function shown(side, kind, text) {
  const line = document.createElement("p");
  line.className = kind;
  line.textContent = text;
  side.log.append(line);
  side.log.scrollTop = side.log.scrollHeight;
  return line;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended early");
    waiting += value;
    const parts = waiting.split("\n\n");
    waiting = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function answered(side, text, settings) {
  shown(side, "user", text);
  const line = shown(side, "assistant waiting", "");
  const system = [{ role: "system", content: settings.system }];
  const turn = { role: "user", content: text };
  const stop = (side.running = new AbortController());
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) },
      body: JSON.stringify({
        model: side.model, stream: true, stream_options: { include_usage: true }, messages: [...system, ...side.turns, turn],
        temperature: settings.temperature, max_tokens: settings.tokens,
      }),
      signal: stop.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      for (const choice of event.choices) line.textContent += choice.delta.content || "";
      side.log.scrollTop = side.log.scrollHeight;
      if (event.usage && event.usage.turns_left_out) {
        shown(side, "note", `The oldest ${event.usage.turns_left_out} turns were left out: the conversation is longer than a prompt may be.`);
      }
    }
    side.turns.push(turn, { role: "assistant", content: line.textContent });
  } catch (error) {
    if (!stop.signal.aborted) shown(side, "error", error.message);
    else if (stop.signal.reason === STOPPED) side.turns.push(turn, { role: "assistant", content: line.textContent });
  } finally {
    line.classList.remove("waiting");
    if (side.running === stop) side.running = null;
  }
}

field("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = field("text").value.trim();
  if (!text || field("send").disabled) return;
  const settings = {
    temperature: field("temperature").valueAsNumber, tokens: field("tokens").valueAsNumber, system: field("system").value.trim(),
  };
  field("text").value = "";
  field("send").disabled = true;
  field("stop").disabled = false;
  await Promise.all(sides.map((side) => answered(side, text, settings)));
  field("send").disabled = false;
  field("stop").disabled = true;
  field("text").focus();
});

field("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    field("ask").requestSubmit();
  }
});

field("stop").addEventListener("click", () => {
  for (const side of sides) {
    if (side.running) side.running.abort(STOPPED);
  }
});

field("new").addEventListener("click", () => {
  for (const side of sides) {
    if (side.running) side.running.abort();
    side.turns = [];
    side.log.replaceChildren();
  }
  field("text").focus();
});
