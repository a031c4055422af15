"""POST /tokenize /detokenize, GET /tokenizer_info: the server's own tokenizer for clients.

Rule: /tokenize gives the very ids that /v1/completions (prompt) and /v1/chat/completions (messages)
would use, special strings as their single id included.
"""

from __future__ import annotations

from k3serve.api.context import Context
from k3serve.api.exchange import Exchange
from k3serve.api.inputs import check_ids
from k3serve.api.policy import ignored_header
from k3serve.api.prompt import chat_prompt
from k3serve.api.replies import Reply, json_reply
from k3serve.api.schema import DetokenizeBody, TokenizeBody, parse
from k3serve.api.tokens import Pieces
from k3serve.errors import RequestError


def tokenizer_info(context: Context, exchange: Exchange) -> Reply:
    if context.tokenizer is None:
        raise RequestError(
            "this checkpoint was loaded without tokenizer files", status=404, code="no_tokenizer"
        )
    return json_reply(context.tokenizer.info())


def tokenize(context: Context, exchange: Exchange) -> Reply:
    body, ignored = parse(TokenizeBody, exchange.json())
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt (a string) or messages", param="prompt")
    if body.prompt is not None:
        ids = context.need_tokenizer("prompt").encode(body.prompt, allow_special=True)
    else:
        ids = list(chat_prompt(context, body, ignored).ids)
    pieces = Pieces(context)
    return json_reply(
        {
            "count": len(ids),
            "max_model_len": context.executor.capacity().max_context,
            "tokens": ids,
            "token_strs": [pieces.text(i) for i in ids] if body.return_token_strs else None,
        },
        headers=ignored_header(ignored),
    )


def detokenize(context: Context, exchange: Exchange) -> Reply:
    body, ignored = parse(DetokenizeBody, exchange.json())
    context.check_model(body.model)
    tokenizer = context.need_tokenizer("tokens")
    ids = check_ids(context, body.tokens, "tokens") if body.tokens else ()
    known = [i for i in ids if i < tokenizer.vocab_size]
    return json_reply({"prompt": tokenizer.decode(known)}, headers=ignored_header(ignored))
