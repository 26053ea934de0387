# The public names, each with the module that it is imported from on first use.
from .comparison.compare import compare as compare
from .comparison.comparison import Comparison as Comparison
from .comparison.comparison import Measured as Measured
from .comparison.specs import MeasureSettings as MeasureSettings
from .comparison.specs import ModelSpec as ModelSpec
from .context.compare_context import compare_context as compare_context
from .context.critical import context_critical as context_critical
from .data.batches import PromptBatch as PromptBatch
from .data.choices import Choice as Choice
from .data.conflicts import Conflict as Conflict
from .data.facts import Fact as Fact
from .data.facts import FactSet as FactSet
from .data.instructions import Instruction as Instruction
from .data.instructions import InstructionSet as InstructionSet
from .data.prompt_sets import PromptSet as PromptSet
from .data.prompts import Prompt as Prompt
from .data.prompts import Template as Template
from .data.prompts import make_prompts as make_prompts
from .data.sources.choices import load_choices as load_choices
from .data.sources.instructions import load_instructions as load_instructions
from .data.sources.load_facts import load_facts as load_facts
from .data.sources.swapped import make_conflicts as make_conflicts
from .data.statements import World as World
from .data.statements import statement_prompts as statement_prompts
from .data.synthetic import synthetic_facts as synthetic_facts
from .errors import AttnBalanceError as AttnBalanceError
from .explanation.explain import explain as explain
from .families.check_families import check_families as check_families
from .finetuning.adapters import add_lora as add_lora
from .finetuning.choice_answers import ChoiceAnswers as ChoiceAnswers
from .finetuning.choice_answers import read_choices as read_choices
from .finetuning.examples import as_examples as as_examples
from .finetuning.examples import make_examples as make_examples
from .finetuning.finetune import finetune as finetune
from .finetuning.generated import generated_facts as generated_facts
from .finetuning.instruct import instruct as instruct
from .finetuning.objectives.parse import parse_objective as parse_objective
from .finetuning.output_loss import read_output_loss as read_output_loss
from .finetuning.parameters import (
    FrozenWeights as FrozenWeights,
)
from .finetuning.parameters import (
    select_weights as select_weights,
)
from .finetuning.parameters import (
    train_only as train_only,
)
from .finetuning.pretrain import Recipe as Recipe
from .finetuning.pretrain import pretrain as pretrain
from .finetuning.ranking import rank_facts as rank_facts
from .finetuning.replay import known_facts as known_facts
from .finetuning.replay import replay as replay
from .finetuning.replay import with_replay as with_replay
from .finetuning.runs import Run as Run
from .finetuning.runs import load_run as load_run
from .finetuning.scale_adapter import scale_adapter as scale_adapter
from .finetuning.settings import FinetuneSettings as FinetuneSettings
from .finetuning.splits import Split as Split
from .finetuning.splits import split_facts as split_facts
from .finetuning.trainer import ObjectiveMixin as ObjectiveMixin
from .finetuning.trainer import ObjectiveTrainer as ObjectiveTrainer
from .finetuning.watch import Watch as Watch
from .models.bridge import BridgedModel as BridgedModel
from .models.bridge import bridge_of as bridge_of
from .models.hooked import HookedModel as HookedModel
from .models.interventions import (
    boost_attention as boost_attention,
)
from .models.interventions import (
    patch_rows as patch_rows,
)
from .models.interventions import (
    random_tokens as random_tokens,
)
from .models.load import load_model as load_model
from .models.weights import transplant_weights as transplant_weights
from .papers.forecast import forecast as forecast
from .papers.reproduce import reproduce as reproduce
from .readings.answer_probability import read_answer_probability as read_answer_probability
from .readings.answer_tokens import AnswerTokens as AnswerTokens
from .readings.answer_tokens import make_answer_tokens as make_answer_tokens
from .readings.attention import AttentionRows as AttentionRows
from .readings.attention import read_attention as read_attention
from .readings.attention import read_attention_by_part as read_attention_by_part
from .readings.change import Change as Change
from .readings.change import read_change as read_change
from .readings.curves import Curve as Curve
from .readings.curves import head_map as head_map
from .readings.curves import layer_curve as layer_curve
from .readings.direct_attribution import (
    DirectAttribution as DirectAttribution,
)
from .readings.direct_attribution import (
    read_direct_attribution as read_direct_attribution,
)
from .readings.drift import read_drift as read_drift
from .readings.knowledge import Knowledge as Knowledge
from .readings.knowledge import knowledge as knowledge
from .readings.paired_accuracy import compare_accuracy as compare_accuracy
from .readings.read_reliance import read_reliance as read_reliance
from .readings.reading import Reading as Reading
from .readings.reading import difference as difference
from .readings.recall import Recall as Recall
from .readings.recall import recall as recall
from .readings.relevance import Relevance as Relevance
from .readings.relevance import read_relevance as read_relevance
from .readings.reliance import Reliance as Reliance
from .readings.salience import (
    ReadoutRanks as ReadoutRanks,
)
from .readings.salience import (
    read_mlp_salience as read_mlp_salience,
)
from .readings.salience import (
    read_readout_ranks as read_readout_ranks,
)
from .readings.salience import (
    read_value_salience as read_value_salience,
)
from .readings.salience import (
    top_neurons as top_neurons,
)
from .readings.steering import rescue as rescue
from .readings.steering import steer_attention as steer_attention
from .readings.value_weighted import read_value_weighted_attention as read_value_weighted_attention
from .report.fact_table import describe_facts as describe_facts
from .report.figures import draw_curves as draw_curves
from .report.figures import draw_head_map as draw_head_map
from .report.heads import show_rows as show_rows
from .statistics.intervals import (
    Interval as Interval,
)
from .statistics.intervals import (
    mean_intervals as mean_intervals,
)
from .statistics.intervals import (
    rank_correlations as rank_correlations,
)
from .statistics.intervals import (
    ratio_intervals as ratio_intervals,
)
from .statistics.shares import gain_interval as gain_interval
from .statistics.shares import share_interval as share_interval
from .storage.compare_salience import compare_salience as compare_salience
from .studies.study import study as study
from .survey.compare_knowledge import compare_knowledge as compare_knowledge
from .trajectory.compare_checkpoints import compare_checkpoints as compare_checkpoints

__all__: list[str]
