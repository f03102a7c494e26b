"""What to try first on a server that has just become ready."""

from __future__ import annotations

import json


def first_steps(address: str, model: str) -> str:
    """Return a curl line and a Python snippet that work as they stand.

    Args:
        address: The server's, without a path.
        model: The name that it serves.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say something"}],
        "max_tokens": 20,
    }
    return f"""
Try it with curl:

  curl -sN {address}/v1/chat/completions \\
    -H 'content-type: application/json' \\
    -d '{json.dumps({**body, "stream": True})}'

or with the OpenAI SDK:

  from openai import OpenAI

  client = OpenAI(base_url="{address}/v1", api_key="none is needed")
  answer = client.chat.completions.create(
      model="{model}",
      messages=[{{"role": "user", "content": "Say something"}}],
      max_tokens=20,
  )
  print(answer.choices[0].message.content)

See what it holds: curl -s {address}/_lifecycle/status
Stop it with Ctrl-C: streams get time to finish."""
