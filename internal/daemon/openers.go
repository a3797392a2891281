package daemon

import (
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
)

// newOpeners makes the finder of who has a device open, and logs how it proves that nobody has.
func newOpeners(log *zap.Logger) *openers.Finder {
	began := time.Now()
	finder := openers.New()
	method, why := finder.Method()
	took := zap.Duration(telemetry.FieldDuration, time.Since(began))
	if why == nil {
		log.Info("the kernel counts who has a device open", took, zap.NamedError("unseen", openers.InFirstNamespace()))
		return finder
	}
	log.Warn("the kernel's count of who has a device open cannot be used: the descriptors of all processes are read instead",
		zap.String("method", string(method)), zap.Error(why), took)
	if err := finder.Blind(); err != nil {
		log.Error("it cannot be seen who has a device open: no volume can be staged or unstaged", zap.Error(err))
	}
	return finder
}

func describeProof(finder *openers.Finder) (proof, reason string) {
	method, why := finder.Method()
	if why != nil {
		reason = why.Error()
	}
	return string(method), reason
}
