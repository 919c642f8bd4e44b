"""OpenAI's role "developer", its newer name for "system", which many templates do not know."""

from gateway_svc.calls import Call
from gateway_svc.chat.conversation import told_tools
from gateway_svc.generating.model_catalog import ModelCatalog
from protos.inference.v1 import inference_pb2 as pb

_NEWER, _OLDER = "developer", "system"


async def settle_roles(request: pb.ChatRequest, call: Call, catalog: ModelCatalog) -> None:
    """Change the role developer to system if the model's template does not mention developers."""
    if turns := [message for message in request.messages if message.role == _NEWER]:
        text = (await catalog.wait(request.model, call)).text
        if _NEWER not in text.template_for(has_tools=bool(told_tools(request))):
            for turn in turns:
                turn.role = _OLDER
