package driver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"k8s.io/klog/v2"

	"github.com/crust-proxy/crust-proxy/internal/ground/run"
	"github.com/crust-proxy/crust-proxy/internal/ground/size"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// DefaultName is the name under which the driver registers.
const DefaultName = "driver.crust-proxy.dev"

// Main runs the command line and returns the exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 && args[0] == commandWatch {
		if err := fsops.Watch(args[1:]); err != nil {
			_, _ = fmt.Fprintln(stderr, "crust-driver:", err)
			return 1
		}
		return 0
	}
	ctx, stop := run.UntilSignal(context.Background())
	defer stop()
	config, show, err := parse(args, stdout, stderr)
	switch {
	case errors.Is(err, pflag.ErrHelp):
		return 0
	case err != nil:
		_, _ = fmt.Fprintf(stderr, "crust-driver: %v\nSee 'crust-driver --help'.\n", err)
		return 2
	case show:
		sys.PrintVersion(stdout, "crust-driver")
		return 0
	case os.Geteuid() != 0:
		_, _ = fmt.Fprintln(stderr, "crust-driver: it attaches devices and mounts filesystems: run it as root")
		return 1
	}
	// mount-utils logs each command that it runs through klog, mount options included.
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	driver, err := New(config)
	if err == nil {
		err = driver.Run(ctx)
	}
	if err != nil {
		config.Log.Error("ended", zap.Error(err))
		return 1
	}
	return 0
}

func parse(args []string, stdout, stderr io.Writer) (config Config, show bool, err error) {
	set := pflag.NewFlagSet("crust-driver", pflag.ContinueOnError)
	set.SetOutput(stdout) // only --help writes there
	host, _ := os.Hostname()
	config.CopyLimit = 1 << 30
	set.StringVar(&config.Endpoint, "endpoint", "unix:///run/crust-driver/csi.sock", "socket to serve CSI on")
	set.StringVar(&config.DataDir, "data-dir", "/var/lib/crust-driver", "directory of the images and records")
	set.StringVar(&config.NodeID, "node-id", host, "name of this node")
	set.StringVar(&config.Name, "driver-name", DefaultName, "name of the driver")
	set.Var((*size.Flag)(&config.Capacity), "capacity", "bytes that may be promised to volumes, such as 100Gi; 0 means what the filesystem has free")
	set.Var((*size.Flag)(&config.CopyLimit), "copy-limit", "most data that a clone may copy where the data directory is not on xfs or btrfs with reflinks; 0 means none")
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
	if show {
		return config, true, nil
	}
	if set.NArg() > 0 {
		return config, false, fmt.Errorf("%q is not expected", set.Arg(0))
	}
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, *level) {
		return config, false, fmt.Errorf("--log-level %q: give debug, info, warn or error", *level)
	}
	config.Log = telemetry.NewLogger(stderr, zap.NewAtomicLevelAt(telemetry.Level(*level)))
	return config, false, config.validate()
}

// Config is the configuration of a driver; parse describes each field. Sockets are unix:///path, or the path alone.
type Config struct {
	Endpoint           string
	DataDir            string
	NodeID             string
	Name               string
	Capacity           int64
	CopyLimit          int64
	CrustProxySocket   string
	FreezeLimit        time.Duration
	Defer              bool
	RegistrationSocket string
	KubeletEndpoint    string
	MetricsListen      string
	Log                *zap.Logger
}

func (c Config) validate() error {
	switch {
	case !filepath.IsAbs(pathOf(c.Endpoint)):
		return fmt.Errorf("--endpoint %q: give unix:///path/of/the.sock, or its absolute path", c.Endpoint)
	case !filepath.IsAbs(c.DataDir):
		return fmt.Errorf("--data-dir %q: give an absolute path", c.DataDir)
	case c.CrustProxySocket != "" && !filepath.IsAbs(pathOf(c.CrustProxySocket)):
		return fmt.Errorf("--crust-proxy-socket %q: give unix:///path/of/the.sock, or its absolute path", c.CrustProxySocket)
	case c.NodeID == "" || c.Name == "":
		return errors.New("--node-id and --driver-name must not be empty")
	case c.FreezeLimit < time.Second || c.FreezeLimit > fsops.MostFrozen || c.FreezeLimit%time.Second != 0:
		return fmt.Errorf("--freeze-limit: give whole seconds, from 1s to %v", fsops.MostFrozen)
	case (c.RegistrationSocket == "") != (c.KubeletEndpoint == ""):
		return errors.New("--kubelet-registration-socket and --kubelet-endpoint go together")
	}
	return nil
}

// pathOf takes a path, or unix:///path.
func pathOf(socket string) string { return strings.TrimPrefix(socket, "unix://") }
