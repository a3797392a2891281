// Package metadata tries the SnapshotMetadata service of a CSI driver, for which csi-sanity
// has no specs: on volumes and snapshots of its own, which are removed in the end. It needs
// raw block volumes and the driver's mount namespace.
package metadata

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

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

// Command is the word of crust-conformance for this suite.
const Command = "snapshot-metadata"

const help = `Try the SnapshotMetadata service of a CSI driver, on volumes and snapshots that are
made and removed by the driver's own calls. Volumes are used as raw block. Run it
as root in the mount namespace of the driver.

Usage:
  crust-conformance snapshot-metadata --csi-endpoint SOCKET [flags]

Exit codes: 0 all demands are met, 1 one is not or the run failed, 2 wrong usage.

Flags:
`

// Main runs the command and gives its exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	var opts Options
	flags := pflag.NewFlagSet(Command, pflag.ContinueOnError)
	flags.Usage = func() {}
	endpoint := flags.String("csi-endpoint", "", "the driver's socket, for all services: a path, or unix:///path")
	flags.Int64Var(&opts.Size, "size", 1<<30, "bytes of a volume; twice that where it can grow")
	flags.StringToStringVar(&opts.Parameters, "parameter", nil, "KEY=VALUE of CreateVolume, as of a StorageClass; may be repeated")
	flags.StringVar(&opts.Dir, "dir", "/var/tmp", "where volumes are published")
	err := flags.Parse(args)
	if errors.Is(err, pflag.ErrHelp) {
		_, _ = fmt.Fprint(stdout, help+flags.FlagUsages())
		return 0
	}
	path := strings.TrimPrefix(*endpoint, "unix://")
	switch {
	case err != nil:
	case flags.NArg() > 0:
		err = fmt.Errorf("%q is not expected", flags.Arg(0))
	case !strings.HasPrefix(path, "/"):
		err = errors.New("--csi-endpoint: give the absolute path of a socket, or unix:///path")
	case opts.Size < leastSize:
		err = fmt.Errorf("--size: give at least %d", leastSize)
	}
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "crust-conformance %[1]s: %[2]v\nSee 'crust-conformance %[1]s --help'.\n", Command, err)
		return 2
	}
	if err := run(ctx, path, opts, stdout); err != nil {
		_, _ = fmt.Fprintf(stderr, "crust-conformance %s: %v\n", Command, err)
		return 1
	}
	return 0
}

// leastSize has room for what is written, each block apart from the others.
const leastSize = 64 * block

func run(ctx context.Context, socket string, opts Options, out io.Writer) error {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	report, err := Run(ctx, conn, opts, func(r conformance.Result) {
		_, _ = fmt.Fprintf(out, "%s %-14s %s\n", r.Status, r.Name, r.Demand)
		if r.Seen != "" {
			_, _ = fmt.Fprintf(out, "     %-14s seen: %s\n", "", r.Seen)
		}
	})
	failed := report.Count(conformance.Fail)
	_, _ = fmt.Fprintf(out, "\n%d passed, %d failed, %d skipped\n", report.Count(conformance.Pass), failed, report.Count(conformance.Skip))
	if failed > 0 {
		err = errors.Join(err, fmt.Errorf("the driver does not meet %d of %d demands", failed, len(report.Results)))
	}
	return err
}

// blockRange is a tuple of a stream.
type blockRange struct{ from, to int64 }

// contains reports whether ranges, together, contain another one.
func contains(all []blockRange, from, to int64) bool {
	for _, one := range all {
		if one.from <= from && one.to > from {
			from = min(one.to, to)
		}
	}
	return from == to
}

// question is a call: for the changed blocks, or without a base for the allocated ones.
type question struct {
	base, target string
	delta        bool
	from         int64
	most         int32
	// stopAfter ends the call after so many messages, as a client that dies; 0: it does not.
	stopAfter int
}

type message interface {
	GetBlockMetadataType() csi.BlockMetadataType
	GetVolumeCapacityBytes() int64
	GetBlockMetadata() []*csi.BlockMetadata
}

// ask reads a stream. Its messages come unchecked.
func (d *driver) ask(ctx context.Context, q question) (all []message, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	receive, err := d.open(ctx, q)
	for err == nil && (q.stopAfter == 0 || len(all) < q.stopAfter) {
		var one message
		if one, err = receive(); err == nil {
			all = append(all, one)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return all, err
}

func (d *driver) open(ctx context.Context, q question) (receive func() (message, error), err error) {
	if q.delta {
		stream, err := d.metadata.GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{
			BaseSnapshotId: q.base, TargetSnapshotId: q.target, StartingOffset: q.from, MaxResults: q.most,
		})
		return func() (message, error) { return stream.Recv() }, err
	}
	stream, err := d.metadata.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{
		SnapshotId: q.target, StartingOffset: q.from, MaxResults: q.most,
	})
	return func() (message, error) { return stream.Recv() }, err
}

func rangesOf(all []message) (ranges []blockRange) {
	for _, one := range all {
		for _, tuple := range one.GetBlockMetadata() {
			ranges = append(ranges, blockRange{tuple.GetByteOffset(), tuple.GetByteOffset() + tuple.GetSizeBytes()})
		}
	}
	return ranges
}

// checkOrder: tuples are not empty, ascend, and do not overlap, also over messages.
func checkOrder(all []message) error {
	last := int64(0)
	for _, one := range rangesOf(all) {
		if one.from < last || one.to <= one.from {
			return fmt.Errorf("bytes %d to %d come after byte %d", one.from, one.to, last)
		}
		last = one.to
	}
	return nil
}

// checkType: all messages have one type. With fixed length, all tuples have one size.
func checkType(all []message) error {
	for _, one := range all {
		kind := one.GetBlockMetadataType()
		if kind != all[0].GetBlockMetadataType() || kind == csi.BlockMetadataType_UNKNOWN {
			return fmt.Errorf("a message of type %v in a stream of %v", kind, all[0].GetBlockMetadataType())
		}
	}
	ranges := rangesOf(all)
	for _, one := range ranges {
		if all[0].GetBlockMetadataType() == csi.BlockMetadataType_FIXED_LENGTH && one.to-one.from != ranges[0].to-ranges[0].from {
			return fmt.Errorf("tuples of %d and of %d bytes, with fixed length", ranges[0].to-ranges[0].from, one.to-one.from)
		}
	}
	return nil
}

// checkCapacity: all messages have one capacity, and all tuples lie in it.
func checkCapacity(all []message, want int64) error {
	for _, one := range all {
		if got := one.GetVolumeCapacityBytes(); got != want {
			return fmt.Errorf("a message with a capacity of %d, and the volume has %d bytes", got, want)
		}
	}
	for _, one := range rangesOf(all) {
		if one.from < 0 || one.to > want {
			return fmt.Errorf("bytes %d to %d of %d", one.from, one.to, want)
		}
	}
	return nil
}
