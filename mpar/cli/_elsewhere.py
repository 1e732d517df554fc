"""What other systems call the keys and choices of mpar, and what mpar does not have. Suggestions look here first."""

import re

__all__ = ["aliases", "key_elsewhere", "not_there", "value_elsewhere"]

_KEYS = {  # by key of mpar: its names elsewhere, without dashes and underscores
    "adapter.alpha": "loraalpha",
    "adapter.dropout": "loradropout",
    "adapter.rank": "lorarank lorar",
    "adapter.targets": "loratarget loratargetmodules targetmodules",
    "data.batch_size": "batchsize bs gbs globalbatchsize trainbatchsize numsequences",
    "data.packing": "pack packsequences",
    "data.seq_len": "seqlength sequencelength maxlength maxseqlen maxseqlength contextlength blocksize cutofflen",
    "data.sources": "dataset datasets datapath trainfile trainfiles datafiles trainingfile files",
    "data.columns": "columnmapping columnmap remapcolumns",
    "data.weights": "interleaveprob interleaveprobs mixingweights datasetweights blend",
    "data.truncation": "truncationstrategy truncationside",
    "data.tokenizer": "tokenizername tokenizerpath tokenizernameorpath tokenizermodel",
    "checkpoint.every": "savesteps saveinterval saveevery checkpointinterval ckptinterval checkpointevery",
    "checkpoint.keep": "savetotallimit keepcheckpoints maxcheckpoints keeplast",
    "device": "accelerator usecuda cuda gpu",
    "evaluation.answers": "numgenerationseval evalnumgenerations",
    "evaluation.every": "evalsteps evalinterval evalevery evaluationsteps",
    "evaluation.fraction": "valsplit validationsplit evalfraction valfraction testsize",
    "evaluation.sources": "evalfile evaldata valdata validationfile evaldataset",
    "kernels": "attnimplementation flashattention useflashattn",
    "log_every": "loggingsteps loginterval logsteps logfreq",
    "mesh.cp": "contextparallel contextparallelsize cpsize sequenceparallelsize ringsize",
    "mesh.dp": "dataparallel dataparallelsize dpsize ddpsize replicas",
    "mesh.fsdp": "fsdpsize dataparallelsharddegree shardsize",
    "mesh.pp": "pipelineparallel pipelineparallelsize pipelinemodelparallelsize ppsize pipelinestages",
    "mesh.tp": "tensorparallel tensorparallelsize tensormodelparallelsize tpsize modelparallelsize mp",
    "model.mtp_loss_weight": "mtp multitokenprediction",
    "model.path": "modelnameorpath modelpath modelname pretrainedmodel checkpointpath hfpath modelid hub repoid",
    "optimizer.betas": "adambeta1 adambeta2 beta1 beta2 adambetas",
    "optimizer.clip_norm": "maxgradnorm gradclip clipgrad gradientclipping gradclipping gradientclipval clipgradnorm",
    "optimizer.eps": "adameps adamepsilon epsilon",
    "optimizer.kind": "optim optimizername optimizertype",
    "optimizer.lr": "learningrate maxlr peaklr baselr",
    "optimizer.lr_decay": "lrscheduler lrschedulertype lrschedule scheduler lrdecaystyle",
    "optimizer.min_lr": "minimumlr finallr endlr minlearningrate",
    "optimizer.warmup_ratio": "warmupratio warmupfraction lrwarmupfraction",
    "optimizer.warmup_steps": "warmup warmupsteps lrwarmupiters numwarmupsteps warmupiters lrwarmupsteps",
    "optimizer.weight_decay": "wd weightdecay l2",
    "precision": "dtype bf16 fp16 mixedprecision torchdtype amp",
    "progress": "disabletqdm tqdm quiet",
    "recompute": "gradientcheckpointing activationcheckpointing recomputeactivations checkpointactivations remat",
    "run_dir": "outputdir outdir savedir logdir expdir workdir save",
    "schedule": "pipelineschedule ppschedule pipelineparallelschedule",
    "schedule.num_chunks": "virtualpipelinemodelparallelsize virtualstages vpp numvirtualstages",
    "schedule.num_microbatches": "gradientaccumulationsteps gradaccumsteps gradaccum accumulationsteps microbatches gas "
    "numgradientaccumulationsteps accumulategradbatches",
    "seed": "randomseed randseed globalseed",
    "steps": "maxsteps trainiters numsteps iterations maxiters totalsteps numtrainepochs epochs numepochs niters iters",
    "strategy": "zerostage zero sharding shardingstrategy parallelism fsdpstrategy deepspeed",
    "strategy.expert_parallel": "ep epsize expertparallelsize expertmodelparallelsize expertparallel",
    "task": "stage trainingtype",
    "timeout_s": "timeout ddptimeout distributedtimeout",
    "tensorboard": "reportto usetensorboard",
    "wandb": "usewandb wandbproject",
}
_VALUES = {  # by key: the value in mpar, with its names elsewhere
    "data.stop": {"first": "firstexhausted", "all": "allexhausted"},
    "data.truncation": {"right": "truncate truncation cut", "drop": "delete", "error": "raise"},
    "device": {"cuda": "gpu nvidia", "cpu": "host none"},
    "mesh": {"one": "single none 1 local"},
    "optimizer": {"adamw": "adam adamwtorch fusedadam adamwfused adamwtorchfused adamw8bit"},
    "optimizer.kind": {"adamw": "adam adamwtorch fusedadam"},
    "optimizer.lr_decay": {
        "constant": "none constantwithwarmup flat",
        "cosine": "cos cosinewithwarmup cosineannealing cosinewithminlr",
        "linear": "linearwithwarmup polynomial",
        "wsd": "warmupstabledecay trapezoidal",
    },
    "precision": {
        "bf16": "bfloat16 half fp16 float16 amp mixed torch.bfloat16",
        "fp32": "float32 float full single torch.float32",
    },
    "recompute": {"full": "true all block layer", "none": "false no off", "selective": "auto partial"},
    "schedule": {
        "one_f_one_b": "1f1b pipedream 1f1bflush oneforwardonebackward",
        "interleaved": "interleaved1f1b vpp virtual",
        "looped_bfs": "interleavedgpipe bfs",
        "gpipe": "fthenb allfallb afab",
        "zb_h1": "zerobubble zbh1 zb",
        "zb_h2": "zbh2",
        "zbv": "zbvzerobubble",
        "dual_pipe": "dualpipe",
        "dual_pipe_v": "dualpipev",
    },
    "strategy": {
        "zero3": "fsdp fsdp2 fullshard 3 stage3 zero deepspeed fullysharded",
        "zero2": "shardgradop 2 stage2",
        "zero1": "1 stage1 distributedoptimizer",
        "hsdp": "hybridshard hybrid",
        "ddp": "dp dataparallel noshard 0 zero0",
        "tp": "tensorparallel megatron",
        "tp_sp": "sequenceparallel tpsp",
    },
    "task": {"pt": "pretrain pretraining clm causallm lm", "sft": "finetune finetuning instruct chat instruction"},
}
_VALUES["schedule.name"], _VALUES["strategy.name"] = _VALUES["schedule"], _VALUES["strategy"]
_NOT_THERE = {  # what people ask for: why there is no key of that kind
    "quantization": "weights of 4 and 8 bits are model.quantise=nf4 and model.quantise=int8",
    "fp8": "FP8 is not there yet: there are precision=fp32 and precision=bf16",
    "dpo": "preferences and rewards are tasks: task=dpo, kto, orpo, cpo, simpo, reward and grpo, with keys such as task.beta",
    "dropout": "dropout of embeddings and of what layers add is model.dropout, that of LoRA adapter.dropout",
}
_SHORT = 7
_ALSO = {
    "quantization": "loadin4bit loadin8bit quantizationbit bnb bits quantizationconfig",
    "fp8": "fp8format transformerengine float8",
    "dpo": "ppo grpo rlhf orpo kto rewardmodel reward",
    "dropout": "attentiondropout hiddendropout",
}


def aliases(known: set[str]) -> dict[str, str]:
    """Names in other systems, and the key of mpar, one of `known`, that each means. Short ones are like too many others."""
    return {name: ours for ours, theirs in _KEYS.items() if ours in known for name in theirs.split() if len(name) > _SHORT}


def key_elsewhere(name: str, known: set[str]) -> str | None:
    """The key of mpar, one of `known`, that is called `name` in other systems, if there is one. Its last part is enough."""
    for asked in (_plain(name), _plain(name.rpartition(".")[2])):
        for ours, theirs in _KEYS.items():
            if asked in theirs.split() and ours in known:
                return ours
    return None


def value_elsewhere(key: str, value: str) -> str | None:
    """The value of the key or group `key` that other systems call `value`, if there is one."""
    found = (ours for ours, theirs in _VALUES.get(key, {}).items() if _plain(value) in (_plain(ours), *theirs.split()))
    return next(found, None)


def not_there(name: str) -> str | None:
    """Why mpar has nothing of this name, for what people often ask for; None for any other name."""
    last = _plain(name.rpartition(".")[2])
    return next((why for what, why in _NOT_THERE.items() if last == what or last in _ALSO[what].split()), None)


def _plain(name: str) -> str:
    """`name` in lower case, without dashes and underscores: `1F1B`, `zero-3` and `learning_rate` are found however written."""
    return re.sub(r"[-_ ]", "", name.lower())
