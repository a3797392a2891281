package daemon

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

type reconcileLoop struct {
	broker   *deferral.Broker
	interval time.Duration
	done     func(deferral.ReconcileReport)
	log      *zap.Logger
}

// Run reconciles at every interval until ctx ends.
func (l *reconcileLoop) Run(ctx context.Context) error {
	if l.interval <= 0 {
		<-ctx.Done()
		return nil
	}
	ticker := time.NewTicker(l.interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		report, err := l.broker.Reconcile(ctx)
		l.done(report)
		if err != nil && ctx.Err() == nil {
			l.log.Error("reconcile failed", zap.Error(err))
		}
	}
}

func logRepairs(log *zap.Logger, metrics *telemetry.Metrics) func(deferral.ReconcileReport) {
	return func(report deferral.ReconcileReport) {
		for _, repair := range report.Repairs {
			metrics.Repaired(repair.Action, repair.Err == nil)
			fields := []zap.Field{zap.String(telemetry.FieldVolume, string(repair.Key)), zap.String(telemetry.FieldAction, repair.Action)}
			if repair.Err != nil {
				log.Error("repair failed", append(fields, zap.Error(repair.Err))...)
				continue
			}
			log.Info("repaired", fields...)
		}
	}
}
