package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

// statement is in-toto's: what is said of files.
type statement struct {
	Type          string    `json:"_type"`
	Subject       []subject `json:"subject"`
	PredicateType string    `json:"predicateType"`
	Predicate     object    `json:"predicate"`
}

type subject struct {
	Name   string            `json:"name"`
	Digest map[string]string `json:"digest"`
}

// provenance prints where the files of a release come from. BUILDER_ID is the URI of who builds.
func provenance(version, commit, sumsFile string) error {
	sums, names, err := readSumsInOrder(sumsFile)
	if err != nil {
		return err
	}
	builder := os.Getenv("BUILDER_ID")
	if builder == "" {
		builder = repository + "#built-by-hand"
	}
	s := statement{Type: statementType, PredicateType: "https://slsa.dev/provenance/v1"}
	for _, name := range names {
		s.Subject = append(s.Subject, subject{name, map[string]string{"sha256": sums[name]}})
	}
	s.Predicate = object{
		"buildDefinition": object{
			"buildType":          repository + "/blob/main/hack/release.sh",
			"externalParameters": object{"repository": "git+" + repository, "ref": "refs/tags/" + version},
			"resolvedDependencies": []object{{
				"uri": "git+" + repository + "@refs/tags/" + version, "digest": object{"gitCommit": commit},
			}},
		},
		"runDetails": object{"builder": object{"id": builder}},
	}
	return printJSON(s)
}

// matches compares the subjects of a provenance with the sums of the files.
func matches(payload []byte, sums map[string]string) error {
	var s statement
	if err := json.Unmarshal(payload, &s); err != nil {
		return err
	}
	if len(s.Subject) != len(sums) {
		return fmt.Errorf("the provenance is of %d files, and there are %d", len(s.Subject), len(sums))
	}
	for _, subject := range s.Subject {
		if sums[subject.Name] != subject.Digest["sha256"] {
			return fmt.Errorf("the provenance is of another %s", subject.Name)
		}
	}
	return nil
}

func readSums(file string) (map[string]string, error) {
	sums, _, err := readSumsInOrder(file)
	return sums, err
}

// readSumsInOrder reads what sha256sum wrote.
func readSumsInOrder(file string) (sums map[string]string, names []string, err error) {
	raw, err := os.ReadFile(file) //nolint:gosec // of the release
	if err != nil {
		return nil, nil, err
	}
	sums = make(map[string]string)
	for line := range strings.Lines(string(raw)) {
		sum, name, found := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		if !found {
			return nil, nil, fmt.Errorf("%s: %q is no sum", file, line)
		}
		sums[name] = sum
		names = append(names, name)
	}
	return sums, names, nil
}
