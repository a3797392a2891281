package backupcli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
)

// blockServer is the server that is asked for blocks: a CSI driver, or the service of a cluster.
type blockServer struct {
	csiSocket, secretsFile                   string
	kubeconfig, kubeContext                  string
	namespace, account, accountIn, forwarded string
	// waiting, if it is set, makes the reader wait for the server, and gets a line for each pause.
	waiting func(line string)
}

func (s *blockServer) reader(source blocks.Source) *blocks.Reader {
	reader := &blocks.Reader{Source: source}
	if s.waiting != nil {
		reader.Tries = blocks.MinutesOfTries
		reader.Broken = func(err error, at int64, pause time.Duration) {
			s.waiting(brokenStream(err, at, pause))
		}
	}
	return reader
}

// ofCluster are the flags that cannot be used with a CSI socket.
var ofCluster = []string{"kubeconfig", "context", "namespace", "service-account", "client-namespace", "address"}

func (s *blockServer) flags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&s.csiSocket, "csi-socket", "", "the socket of the CSI driver that has the snapshot")
	flags.StringVar(&s.secretsFile, "secrets-file", "", "a YAML or JSON file with the secrets that this driver wants, by their names")
	flags.StringVar(&s.kubeconfig, "kubeconfig", "", "how to get to the cluster (default: as kubectl)")
	flags.StringVar(&s.kubeContext, "context", "", "the context of the kubeconfig (default: the current one)")
	flags.StringVarP(&s.namespace, "namespace", "n", "", "the snapshot's (default: that of the context)")
	flags.StringVar(&s.account, "service-account", "default", "whose token the service gets")
	flags.StringVar(&s.accountIn, "client-namespace", "", "the service account's (default: that of the snapshot)")
	flags.StringVar(&s.forwarded, "address", "", "HOST:PORT of the service, if it is not to be reached at its own, such as 127.0.0.1:6443")
}

func (s *blockServer) check(cmd *cobra.Command) error {
	if s.secretsFile != "" && s.csiSocket == "" {
		return errors.New("--secrets-file is for --csi-socket; in a cluster the driver's sidecar finds its secrets")
	}
	for _, name := range ofCluster {
		if s.csiSocket != "" && cmd.Flags().Changed(name) {
			return fmt.Errorf("--%s is for a cluster, and --csi-socket asks a driver", name)
		}
	}
	return nil
}

type question struct {
	target string
	// base is a name as target is, and baseID is CSI's id. Both are empty for allocated blocks.
	base, baseID string
}

func (q question) check() error {
	if q.base != "" && q.baseID != "" {
		return errors.New("--base and --base-id name the same thing")
	}
	return nil
}

// blocksOf processes the blocks of a snapshot with this CSI id.
type blocksOf func(ctx context.Context, id string, reader *blocks.Reader) error

// with connects to the server, calls do, and explains its errors.
func (s *blockServer) with(ctx context.Context, of question, do blocksOf) error {
	if s.csiSocket == "" {
		return explainBlocks(ctx, s.withCluster(ctx, of, do))
	}
	secrets, err := s.secrets()
	if err != nil {
		return err
	}
	conn, err := blocks.DialCSI(s.csiSocket)
	if err != nil {
		return command.Explain(err, "The driver's pod and its --endpoint show where the socket is on the node.")
	}
	err = do(ctx, of.target, s.reader(blocks.FromCSI(conn, cmp.Or(of.baseID, of.base), of.target, secrets)))
	return errors.Join(explainBlocks(ctx, err), conn.Close())
}

// mostSecrets is the largest size of a Kubernetes Secret.
const mostSecrets = 1 << 20

// secrets reads the file of secrets. Its errors never quote the content.
func (s *blockServer) secrets() (map[string]string, error) {
	if s.secretsFile == "" {
		return nil, nil
	}
	file, err := os.Open(s.secretsFile)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	raw, err := io.ReadAll(io.LimitReader(file, mostSecrets+1))
	if err != nil {
		return nil, err
	}
	given, secrets := make(map[string]any), make(map[string]string)
	ok := len(raw) <= mostSecrets && yaml.UnmarshalStrict(raw, &given) == nil
	for name, value := range given {
		text, isText := value.(string)
		ok = ok && isText && secretName.MatchString(name)
		secrets[name] = text
	}
	if !ok {
		return nil, fmt.Errorf("%s does not have, as YAML or JSON of 1 MiB at most, a text for each name of letters, digits, '-', '_' and '.': "+
			"put quotes around a number", s.secretsFile)
	}
	return secrets, nil
}

// secretName is the form that CSI requires.
var secretName = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)

// withCluster does what backup software does: find the snapshot's driver and its service, and request a token.
func (s *blockServer) withCluster(ctx context.Context, of question, do blocksOf) error {
	cluster, err := blocks.OpenCluster(s.kubeconfig, s.kubeContext, s.namespace)
	if err != nil {
		return err
	}
	target, err := cluster.Snapshot(ctx, of.target)
	if err != nil {
		return err
	}
	if of.base != "" {
		if of.baseID, err = cluster.Base(ctx, of.base, target); err != nil {
			return err
		}
	}
	service, err := cluster.Service(ctx, target.Driver)
	if err != nil {
		return err
	}
	conn, err := service.Dial(s.forwarded)
	if err != nil {
		return err
	}
	tokens := func(ctx context.Context) (string, error) {
		return cluster.Token(ctx, cmp.Or(s.accountIn, cluster.Namespace), s.account, service.Audience)
	}
	source := cluster.Unchanged(target, of.target, blocks.FromService(conn, tokens, cluster.Namespace, of.baseID, of.target))
	err = do(ctx, target.ID, s.reader(source))
	return errors.Join(err, conn.Close())
}
