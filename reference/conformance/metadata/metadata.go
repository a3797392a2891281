// Package metadata tries the SnapshotMetadata service of a CSI driver, for which csi-sanity
// has no specs: on volumes and snapshots of its own, which are removed in the end. It needs
// raw block volumes and the driver's mount namespace.
package metadata

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/reference/conformance"
)

// Options say how volumes are made.
type Options struct {
	// Size is that of the volumes, in bytes.
	Size int64
	// Parameters are those of CreateVolume.
	Parameters map[string]string
	// Dir is where the volumes are published, in a directory of the run's own.
	Dir string
}

// cleanupTimeout bounds the removal of what a run has made.
const cleanupTimeout = 2 * time.Minute

// Run tries each demand and reports its result at once. An error says that volumes or
// snapshots could not be made or removed, and nothing of the service.
func Run(ctx context.Context, conn grpc.ClientConnInterface, opts Options, onResult func(conformance.Result)) (conformance.Report, error) {
	d, err := newDriver(ctx, conn, opts)
	if err != nil {
		return conformance.Report{}, err
	}
	report := conformance.Report{Run: d.run}
	f, err := d.fixture(ctx)
	for _, s := range specs() {
		if err != nil {
			break
		}
		err = ctx.Err()
		result := s.result(ctx, f)
		report.Results = append(report.Results, result)
		onResult(result)
	}
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	return report, errors.Join(err, d.cleanUp(ending))
}

// errSkipped is the answer of a spec that does not apply.
var errSkipped = errors.New("the driver does not report what this needs")

func (s spec) result(ctx context.Context, f *fixture) conformance.Result {
	ctx, cancel := context.WithTimeout(ctx, specTimeout)
	defer cancel()
	result := conformance.Result{Name: s.name, Status: conformance.Pass, Section: "SnapshotMetadata", Demand: s.demand}
	if err := s.try(ctx, f); err != nil {
		result.Status, result.Seen = conformance.Fail, err.Error()
		if errors.Is(err, errSkipped) {
			result.Status = conformance.Skip
		}
	}
	return result
}

// specTimeout is what a few streams of a small volume may take.
const specTimeout = time.Minute
