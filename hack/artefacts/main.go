// Artefacts makes and checks what accompanies the files of a release: the list of what the
// programs contain (SBOM), where they come from (provenance), and signatures.
//
//	artefacts sbom VERSION PACKAGES-FILE PROGRAM...   prints CycloneDX; the file: NAME VERSION ARCH of Debian's packages
//	artefacts provenance VERSION COMMIT SHA256SUMS    prints an in-toto statement with SLSA's provenance
//	artefacts key FILE                                makes a private key, and FILE.pub
//	artefacts sign KEY FILE...                        makes FILE.sigstore.json; a statement is signed as one
//	artefacts verify PUBLIC-KEY DIRECTORY             checks the files, their sums and all signatures
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "artefacts:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("usage: see its source")
	}
	switch command, args := args[0], args[1:]; {
	case command == "sbom" && len(args) > 2:
		return sbom(args[0], args[1], args[2:])
	case command == "provenance" && len(args) == 3:
		return provenance(args[0], args[1], args[2])
	case command == "key":
		return makeKey(args[0])
	case command == "sign" && len(args) > 1:
		return sign(args[0], args[1:])
	case command == "verify" && len(args) == 2:
		return verify(args[0], args[1])
	}
	return fmt.Errorf("usage: %q is not known", args)
}

// object is a JSON object; its keys are printed in alphabetical order.
type object = map[string]any

func printJSON(value any) error {
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}
