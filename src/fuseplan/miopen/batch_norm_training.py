"""Batch normalization by the batch's statistics, and its backward pass, in one call."""

from __future__ import annotations

from fuseplan.miopen.activations import miopenActivationDescriptor_t
from fuseplan.miopen.call import Pointer, Scalar, api
from fuseplan.miopen.enums import miopenBatchNormMode_t
from fuseplan.miopen.handle import miopenHandle_t
from fuseplan.miopen.normalization import Normalization, check_plain
from fuseplan.miopen.tensors import miopenTensorDescriptor_t


@api
def miopenBatchNormalizationForwardTraining(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    yDesc: miopenTensorDescriptor_t,
    y: Pointer,
    bnScaleBiasMeanVarDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    bnBias: Pointer,
    expAvgFactor: float,
    resultRunningMean: Pointer | None,
    resultRunningVariance: Pointer | None,
    epsilon: float,
    resultSaveMean: Pointer | None,
    resultSaveInvVariance: Pointer | None,
) -> None:
    """Normalizes x and, where they are not null, saves and updates statistics."""
    made = Normalization(handle, bn_mode, alpha, beta, (xDesc, x), (yDesc, y))
    made.check(bnScaleBiasMeanVarDesc=bnScaleBiasMeanVarDesc)
    saved = {"resultSaveMean": resultSaveMean, "resultSaveInvVariance": resultSaveInvVariance}
    running = {"resultRunningMean": resultRunningMean, "resultRunningVariance": resultRunningVariance}
    made.train(bnScale, bnBias, epsilon, saved, running, expAvgFactor)


@api
def miopenBatchNormalizationForwardTraining_V2(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    yDesc: miopenTensorDescriptor_t,
    y: Pointer,
    scaleDesc: miopenTensorDescriptor_t,
    biasVarDesc: miopenTensorDescriptor_t,
    savedMeanDesc: miopenTensorDescriptor_t,
    savedVarDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    bnBias: Pointer,
    expAvgFactor: float,
    resultRunningMean: Pointer | None,
    resultRunningVariance: Pointer | None,
    epsilon: float,
    resultSaveMean: Pointer | None,
    resultSaveInvVariance: Pointer | None,
) -> None:
    """The same with a descriptor for each parameter."""
    made = Normalization(handle, bn_mode, alpha, beta, (xDesc, x), (yDesc, y))
    made.check(
        scaleDesc=scaleDesc, biasVarDesc=biasVarDesc, savedMeanDesc=savedMeanDesc, savedVarDesc=savedVarDesc
    )
    saved = {"resultSaveMean": resultSaveMean, "resultSaveInvVariance": resultSaveInvVariance}
    running = {"resultRunningMean": resultRunningMean, "resultRunningVariance": resultRunningVariance}
    made.train(bnScale, bnBias, epsilon, saved, running, expAvgFactor)


@api
def miopenBatchNormalizationForwardTraining_V3(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    yDesc: miopenTensorDescriptor_t,
    y: Pointer,
    scaleDesc: miopenTensorDescriptor_t,
    biasVarDesc: miopenTensorDescriptor_t,
    savedMeanDesc: miopenTensorDescriptor_t,
    savedVarDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    bnBias: Pointer,
    expAvgFactor: float,
    prevResultRunningMean: Pointer | None,
    prevResultRunningVariance: Pointer | None,
    nextResultRunningMean: Pointer | None,
    nextResultRunningVariance: Pointer | None,
    epsilon: float,
    resultSaveMean: Pointer | None,
    resultSaveInvVariance: Pointer | None,
) -> None:
    """The same; running statistics are read from one pair of tensors and written into another."""
    made = Normalization(handle, bn_mode, alpha, beta, (xDesc, x), (yDesc, y))
    made.check(
        scaleDesc=scaleDesc, biasVarDesc=biasVarDesc, savedMeanDesc=savedMeanDesc, savedVarDesc=savedVarDesc
    )
    saved = {"resultSaveMean": resultSaveMean, "resultSaveInvVariance": resultSaveInvVariance}
    old = {
        "prevResultRunningMean": prevResultRunningMean,
        "prevResultRunningVariance": prevResultRunningVariance,
    }
    running = {
        "nextResultRunningMean": nextResultRunningMean,
        "nextResultRunningVariance": nextResultRunningVariance,
    }
    made.train(bnScale, bnBias, epsilon, saved, running, expAvgFactor, old)


@api
def miopenBatchNormForwardTrainingActivation(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    yDesc: miopenTensorDescriptor_t,
    y: Pointer,
    scaleDesc: miopenTensorDescriptor_t,
    biasVarDesc: miopenTensorDescriptor_t,
    savedMeanDesc: miopenTensorDescriptor_t,
    savedVarDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    bnBias: Pointer,
    expAvgFactor: float,
    resultRunningMean: Pointer | None,
    resultRunningVariance: Pointer | None,
    epsilon: float,
    resultSaveMean: Pointer | None,
    resultSaveInvVariance: Pointer | None,
    activDesc: miopenActivationDescriptor_t,
) -> None:
    """Normalizes x and applies an activation, any mode; saves and updates statistics."""
    made = Normalization(handle, bn_mode, alpha, beta, (xDesc, x), (yDesc, y), activDesc)
    made.check(
        scaleDesc=scaleDesc, biasVarDesc=biasVarDesc, savedMeanDesc=savedMeanDesc, savedVarDesc=savedVarDesc
    )
    saved = {"resultSaveMean": resultSaveMean, "resultSaveInvVariance": resultSaveInvVariance}
    running = {"resultRunningMean": resultRunningMean, "resultRunningVariance": resultRunningVariance}
    made.train(bnScale, bnBias, epsilon, saved, running, expAvgFactor)


@api
def miopenBatchNormForwardTrainingActivation_V2(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    yDesc: miopenTensorDescriptor_t,
    y: Pointer,
    scaleDesc: miopenTensorDescriptor_t,
    biasVarDesc: miopenTensorDescriptor_t,
    savedMeanDesc: miopenTensorDescriptor_t,
    savedVarDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    bnBias: Pointer,
    expAvgFactor: float,
    prevResultRunningMean: Pointer | None,
    prevResultRunningVariance: Pointer | None,
    nextResultRunningMean: Pointer | None,
    nextResultRunningVariance: Pointer | None,
    epsilon: float,
    resultSaveMean: Pointer | None,
    resultSaveInvVariance: Pointer | None,
    activDesc: miopenActivationDescriptor_t,
) -> None:
    """The same; running statistics are read from one pair of tensors and written into another."""
    made = Normalization(handle, bn_mode, alpha, beta, (xDesc, x), (yDesc, y), activDesc)
    made.check(
        scaleDesc=scaleDesc, biasVarDesc=biasVarDesc, savedMeanDesc=savedMeanDesc, savedVarDesc=savedVarDesc
    )
    saved = {"resultSaveMean": resultSaveMean, "resultSaveInvVariance": resultSaveInvVariance}
    old = {
        "prevResultRunningMean": prevResultRunningMean,
        "prevResultRunningVariance": prevResultRunningVariance,
    }
    running = {
        "nextResultRunningMean": nextResultRunningMean,
        "nextResultRunningVariance": nextResultRunningVariance,
    }
    made.train(bnScale, bnBias, epsilon, saved, running, expAvgFactor, old)


@api
def miopenBatchNormalizationBackward(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alphaDataDiff: Scalar | None,
    betaDataDiff: Scalar | None,
    alphaParamDiff: Scalar | None,
    betaParamDiff: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    dyDesc: miopenTensorDescriptor_t,
    dy: Pointer,
    dxDesc: miopenTensorDescriptor_t,
    dx: Pointer,
    bnScaleBiasDiffDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    resultBnScaleDiff: Pointer,
    resultBnBiasDiff: Pointer,
    epsilon: float,
    savedMean: Pointer | None,
    savedInvVariance: Pointer | None,
) -> None:
    """Computes the gradients; saved statistics that are null, both, are computed again."""
    made = Normalization(handle, bn_mode, alphaDataDiff, betaDataDiff, (dyDesc, dy), (dxDesc, dx))
    made.check(bnScaleBiasDiffDesc=bnScaleBiasDiffDesc)
    check_plain(alphaParamDiff, betaParamDiff)
    gradients = (resultBnScaleDiff, resultBnBiasDiff)
    made.differentiate((xDesc, x), bnScale, None, gradients, (savedMean, savedInvVariance), epsilon)


@api
def miopenBatchNormalizationBackward_V2(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alphaDataDiff: Scalar | None,
    betaDataDiff: Scalar | None,
    alphaParamDiff: Scalar | None,
    betaParamDiff: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    dyDesc: miopenTensorDescriptor_t,
    dy: Pointer,
    dxDesc: miopenTensorDescriptor_t,
    dx: Pointer,
    scaleDesc: miopenTensorDescriptor_t,
    biasDesc: miopenTensorDescriptor_t,
    savedMeanDesc: miopenTensorDescriptor_t,
    savedVarDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    resultBnScaleDiff: Pointer,
    resultBnBiasDiff: Pointer,
    epsilon: float,
    savedMean: Pointer | None,
    savedInvVariance: Pointer | None,
) -> None:
    """The same with a descriptor for each parameter."""
    made = Normalization(handle, bn_mode, alphaDataDiff, betaDataDiff, (dyDesc, dy), (dxDesc, dx))
    made.check(scaleDesc=scaleDesc, biasDesc=biasDesc, savedMeanDesc=savedMeanDesc, savedVarDesc=savedVarDesc)
    check_plain(alphaParamDiff, betaParamDiff)
    gradients = (resultBnScaleDiff, resultBnBiasDiff)
    made.differentiate((xDesc, x), bnScale, None, gradients, (savedMean, savedInvVariance), epsilon)


@api
def miopenBatchNormBackwardActivation(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alphaDataDiff: Scalar | None,
    betaDataDiff: Scalar | None,
    alphaParamDiff: Scalar | None,
    betaParamDiff: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    dyDesc: miopenTensorDescriptor_t,
    dy: Pointer,
    dxDesc: miopenTensorDescriptor_t,
    dx: Pointer,
    scaleDesc: miopenTensorDescriptor_t,
    biasDesc: miopenTensorDescriptor_t,
    savedMeanDesc: miopenTensorDescriptor_t,
    savedVarianceDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    bnBias: Pointer,
    resultBnScaleDiff: Pointer,
    resultBnBiasDiff: Pointer,
    epsilon: float,
    savedMean: Pointer | None,
    savedInvVariance: Pointer | None,
    activDesc: miopenActivationDescriptor_t,
) -> None:
    """Computes the gradients behind an activation: any mode."""
    made = Normalization(handle, bn_mode, alphaDataDiff, betaDataDiff, (dyDesc, dy), (dxDesc, dx), activDesc)
    made.check(
        scaleDesc=scaleDesc,
        biasDesc=biasDesc,
        savedMeanDesc=savedMeanDesc,
        savedVarianceDesc=savedVarianceDesc,
    )
    check_plain(alphaParamDiff, betaParamDiff)
    gradients = (resultBnScaleDiff, resultBnBiasDiff)
    made.differentiate((xDesc, x), bnScale, bnBias, gradients, (savedMean, savedInvVariance), epsilon)
