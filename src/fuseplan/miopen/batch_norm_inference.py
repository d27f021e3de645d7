"""Batch normalization by frozen statistics in one call, alone and with an activation behind it."""

from __future__ import annotations

from fuseplan.miopen.activations import miopenActivationDescriptor_t
from fuseplan.miopen.call import Pointer, Scalar, api
from fuseplan.miopen.enums import miopenBatchNormMode_t
from fuseplan.miopen.handle import miopenHandle_t
from fuseplan.miopen.normalization import Normalization
from fuseplan.miopen.tensors import miopenTensorDescriptor_t


@api
def miopenBatchNormalizationForwardInference(
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
    estimatedMean: Pointer | None,
    estimatedVariance: Pointer | None,
    epsilon: float,
) -> None:
    """Normalizes x; statistics that are null, both, are the batch's."""
    made = Normalization(handle, bn_mode, alpha, beta, (xDesc, x), (yDesc, y))
    made.check(bnScaleBiasMeanVarDesc=bnScaleBiasMeanVarDesc)
    made.infer(bnScale, bnBias, estimatedMean, estimatedVariance, epsilon)


@api
def miopenBatchNormalizationForwardInference_V2(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    yDesc: miopenTensorDescriptor_t,
    y: Pointer,
    scaleDesc: miopenTensorDescriptor_t,
    biasDesc: miopenTensorDescriptor_t,
    estMeanDesc: miopenTensorDescriptor_t,
    estVarianceDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    bnBias: Pointer,
    estimatedMean: Pointer | None,
    estimatedVariance: Pointer | None,
    epsilon: float,
) -> None:
    """The same with a descriptor for each parameter."""
    made = Normalization(handle, bn_mode, alpha, beta, (xDesc, x), (yDesc, y))
    made.check(
        scaleDesc=scaleDesc, biasDesc=biasDesc, estMeanDesc=estMeanDesc, estVarianceDesc=estVarianceDesc
    )
    made.infer(bnScale, bnBias, estimatedMean, estimatedVariance, epsilon)


@api
def miopenBatchNormalizationForwardInferenceInvVariance(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    yDesc: miopenTensorDescriptor_t,
    y: Pointer,
    scaleDesc: miopenTensorDescriptor_t,
    biasDesc: miopenTensorDescriptor_t,
    estMeanDesc: miopenTensorDescriptor_t,
    estInvVarianceDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    bnBias: Pointer,
    estimatedMean: Pointer | None,
    estimatedInvVariance: Pointer | None,
) -> None:
    """Normalizes x by a mean and an inverse variance, 1/sqrt(variance + epsilon)."""
    made = Normalization(handle, bn_mode, alpha, beta, (xDesc, x), (yDesc, y))
    made.check(
        scaleDesc=scaleDesc, biasDesc=biasDesc, estMeanDesc=estMeanDesc, estInvVarianceDesc=estInvVarianceDesc
    )
    made.infer(bnScale, bnBias, estimatedMean, estimatedInvVariance, None)


@api
def miopenBatchNormForwardInferenceActivation(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    yDesc: miopenTensorDescriptor_t,
    y: Pointer,
    scaleDesc: miopenTensorDescriptor_t,
    biasDesc: miopenTensorDescriptor_t,
    estMeanDesc: miopenTensorDescriptor_t,
    estVarianceDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    bnBias: Pointer,
    estimatedMean: Pointer | None,
    estimatedVariance: Pointer | None,
    epsilon: float,
    activDesc: miopenActivationDescriptor_t,
) -> None:
    """Normalizes x and applies an activation: any mode."""
    made = Normalization(handle, bn_mode, alpha, beta, (xDesc, x), (yDesc, y), activDesc)
    made.check(
        scaleDesc=scaleDesc, biasDesc=biasDesc, estMeanDesc=estMeanDesc, estVarianceDesc=estVarianceDesc
    )
    made.infer(bnScale, bnBias, estimatedMean, estimatedVariance, epsilon)


@api
def miopenBatchNormForwardInferenceActivationInvVariance(
    handle: miopenHandle_t,
    bn_mode: miopenBatchNormMode_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    yDesc: miopenTensorDescriptor_t,
    y: Pointer,
    scaleDesc: miopenTensorDescriptor_t,
    biasDesc: miopenTensorDescriptor_t,
    estMeanDesc: miopenTensorDescriptor_t,
    estInvVarianceDesc: miopenTensorDescriptor_t,
    bnScale: Pointer,
    bnBias: Pointer,
    estimatedMean: Pointer | None,
    estimatedInvVariance: Pointer | None,
    activDesc: miopenActivationDescriptor_t,
) -> None:
    """Normalizes x by an inverse variance and applies an activation: any mode."""
    made = Normalization(handle, bn_mode, alpha, beta, (xDesc, x), (yDesc, y), activDesc)
    made.check(
        scaleDesc=scaleDesc, biasDesc=biasDesc, estMeanDesc=estMeanDesc, estInvVarianceDesc=estInvVarianceDesc
    )
    made.infer(bnScale, bnBias, estimatedMean, estimatedInvVariance, None)
