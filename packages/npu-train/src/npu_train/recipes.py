"""The list of recipes that ``npu-train run NAME`` knows. What they train is in recipe_configs.py; no heavy imports."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """A named configuration.

    Attributes:
        name: What the command line calls it.
        module: torchtitan's ``--module``: a registry of configuration functions.
        config: torchtitan's ``--config``: the function.
        model: Family and shape, for people.
        purpose: What it is for.
        size: Parameters, for people.
        needs: What must be there first, or "" for nothing.
        prompts: Texts to continue after training; empty to skip that.
    """

    name: str
    module: str
    config: str
    model: str
    purpose: str
    size: str
    needs: str = ""
    prompts: tuple[str, ...] = ()


_OURS = "npu_train.recipe_configs"

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="quickstart",
            module=_OURS,
            config="quickstart",
            model="llama3, 4 layers x 192",
            purpose="a language model of English and Chinese classics, in minutes on 2 CPU cores",
            size="2.4 M",
            prompts=("The king said", "却说"),
        ),
        Recipe(
            name="llama3_debugmodel",
            module="llama3",
            config="llama3_debugmodel",
            model="llama3, 6 layers x 256",
            purpose="torchtitan's own debug configuration",
            size="6.2 M",
        ),
        Recipe(
            name="deepseek_v3_debugmodel",
            module="deepseek_v3",
            config="deepseek_v3_debugmodel",
            model="deepseek_v3, 6 layers x 256, 8 experts",
            purpose="torchtitan's own debug configuration of a mixture of experts: try expert parallelism",
            size="33.0 M",
        ),
        Recipe(
            name="llama3_8b",
            module="llama3",
            config="llama3_8b",
            model="llama3, 32 layers x 4096",
            purpose="torchtitan's own 8B configuration",
            size="8.0 B",
            needs="tokenizer in ./assets/hf/Llama-3.1-8B (or --hf-assets-path DIR), accelerators",
        ),
    )
}
