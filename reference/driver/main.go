package driver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"k8s.io/klog/v2"

	"github.com/crust-proxy/crust-proxy/internal/run"
	"github.com/crust-proxy/crust-proxy/internal/telemetry"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// DefaultName is the name under which the driver registers.
const DefaultName = "driver.crust-proxy.dev"

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

// Main runs the command line and gives the exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 && args[0] == commandWatch {
		return watch(args[1:], stderr)
	}
	ctx, stop := run.UntilSignal(context.Background())
	defer stop()
	config, show, err := parse(args, stderr)
	switch {
	case errors.Is(err, pflag.ErrHelp):
		return 0
	case err != nil:
		_, _ = fmt.Fprintln(stderr, "crust-driver:", err)
		return 2
	case show:
		_, _ = fmt.Fprintln(stdout, version())
		return 0
	}
	// mount-utils logs through klog whatever it runs, mount options included.
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	if err := serve(ctx, config); err != nil {
		config.Log.Error("ended", zap.Error(err))
		return 1
	}
	return 0
}

// watch ends a freeze that nobody else ends. It has all that it needs in its arguments.
func watch(args []string, stderr io.Writer) int {
	if err := fsops.Watch(args); err != nil {
		_, _ = fmt.Fprintln(stderr, "crust-driver:", err)
		return 1
	}
	return 0
}

func serve(ctx context.Context, config Config) error {
	driver, err := New(config)
	if err != nil {
		return err
	}
	return driver.Run(ctx)
}

func parse(args []string, stderr io.Writer) (config Config, show bool, err error) {
	set := pflag.NewFlagSet("crust-driver", pflag.ContinueOnError)
	set.SetOutput(stderr)
	host, _ := os.Hostname()
	set.StringVar(&config.Endpoint, "endpoint", "unix:///run/crust-driver/csi.sock", "socket to serve CSI on")
	set.StringVar(&config.DataDir, "data-dir", "/var/lib/crust-driver", "directory of the images and records")
	set.StringVar(&config.NodeID, "node-id", host, "name of this node")
	set.StringVar(&config.Name, "driver-name", DefaultName, "name of the driver")
	set.Int64Var(&config.Capacity, "capacity", 0, "bytes that may be promised to volumes; 0 means what the filesystem has free")
	set.Int64Var(&config.CopyLimit, "copy-limit", 1<<30, "most bytes of data that a clone may copy where the data directory is not on xfs or btrfs with reflinks; 0 means none")
	set.StringVar(&config.CrustProxySocket, "crust-proxy-socket", "", "crust-proxy's Admin socket, to have sandboxes freeze volumes for snapshots and clones; empty: they do not")
	set.DurationVar(&config.FreezeLimit, "freeze-limit", 2*time.Second, "longest time for which writes to a volume are held")
	set.BoolVar(&config.Defer, "defer", false, "report DEFER_FS_OPS and leave filesystems to sandboxes where asked to")
	set.StringVar(&config.RegistrationSocket, "kubelet-registration-socket", "", "socket on which to register with kubelet; empty: a registrar does it")
	set.StringVar(&config.KubeletEndpoint, "kubelet-endpoint", "", "path at which kubelet finds the CSI socket")
	set.StringVar(&config.MetricsListen, "metrics-listen", "", "metrics and health: host:port or unix:/path; empty: none")
	level := set.String("log-level", "info", "debug, info, warn or error")
	set.BoolVar(&show, "version", false, "show the version")
	if err := set.Parse(args); err != nil {
		return config, false, err
	}
	if set.NArg() > 0 {
		return config, false, fmt.Errorf("%q is not expected: see --help", set.Arg(0))
	}
	config.Log = telemetry.NewLogger(stderr, zap.NewAtomicLevelAt(telemetry.Level(*level)))
	return config, show, nil
}
