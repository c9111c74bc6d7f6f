"use strict";
const field = (id) => document.getElementById(id);
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
      yield JSON.parse(data);
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
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: side.model, stream: true, messages: [...system, ...side.turns, turn],
        temperature: settings.temperature, max_tokens: settings.tokens,
      }),
      signal: stop.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      line.textContent += event.choices[0].delta.content || "";
      side.log.scrollTop = side.log.scrollHeight;
      if (event.usage && event.usage.turns_left_out) {
        shown(side, "note", `The oldest ${event.usage.turns_left_out} turns were left out: the conversation is longer than a prompt may be.`);
      }
    }
    side.turns.push(turn, { role: "assistant", content: line.textContent });
  } catch (error) {
    if (error.name !== "AbortError") shown(side, "error", error.message);
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
  await Promise.all(sides.map((side) => answered(side, text, settings)));
  field("send").disabled = false;
  field("text").focus();
});

field("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    field("ask").requestSubmit();
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
